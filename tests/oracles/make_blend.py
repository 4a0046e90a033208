"""Which dataset each sample of a blend is of, by Megatron-Core's own helper:

    python make_blend.py > ../../executor/src/data/blend/golden.json
"""

import json

import numpy
from megatron.core.datasets import helpers_cpp

SAMPLES = 48
WEIGHTS = [0.5, 0.5], [3, 7], [1, 2, 4], [0.615, 0.3, 0.085], [1000, 1, 1, 1]


def draws(weights):
    shares = numpy.array(weights, dtype=numpy.float64)
    shares = shares / shares.sum()
    datasets, samples = numpy.zeros(SAMPLES, numpy.int16), numpy.zeros(SAMPLES, numpy.int64)
    helpers_cpp.build_blending_indices(datasets, samples, shares, len(weights), SAMPLES, False)
    return {"weights": weights, "datasets": datasets.tolist(), "samples": samples.tolist()}


if __name__ == "__main__":
    print("[\n" + ",\n".join(json.dumps(draws(weights)) for weights in WEIGHTS) + "\n]")
