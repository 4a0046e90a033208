"""Datasets as Megatron-Core's own classes read and write them (`pip install megatron-core`). Documents are lists of sequences, those lists
of token ids.

    python megatron_dataset.py read PREFIX                     writes the type of an id and the documents, as JSON
    python megatron_dataset.py write PREFIX TYPE < documents   the other way; TYPE is numpy's
"""

import json
import sys

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def read(prefix):
    dataset = IndexedDataset(prefix)
    ends = dataset.document_indices.tolist()
    documents = [[dataset[i].tolist() for i in range(*ends[j : j + 2])] for j in range(len(ends) - 1)]
    # A part of each sequence again, as training reads it.
    for i in range(len(dataset)):
        assert dataset.get(i, offset=len(dataset[i]) // 2).tolist() == dataset[i].tolist()[len(dataset[i]) // 2 :]
    return {"type": numpy.dtype(dataset.index.dtype).name, "documents": documents}


def write(prefix, dtype, documents):
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.dtype(dtype).type)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(prefix + ".idx")


if __name__ == "__main__":
    if sys.argv[1] == "read":
        print(json.dumps(read(sys.argv[2])))
    else:
        write(sys.argv[2], sys.argv[3], json.load(sys.stdin))
