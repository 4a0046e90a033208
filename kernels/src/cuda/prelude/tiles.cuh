// Tiles of one matrix product per group of rows, in the order that blocks take them.
//
// Group g is the rows `offsets[g]` to `offsets[g + 1]`, read from device memory; without offsets there
// is one group, of all `rows`. Either the rows of C are grouped (a group has as many row tiles as its
// rows fill, none where it is empty), or those that are summed over (every group has a C of its own).
#pragma once

// A tile of C: its group, and its place there counted in tiles.
struct Tile {
  i32 group, row, column;
};

// Row tiles that are worked on together, so that what they read stays in the level-two cache.
#define BAND 16

DEV i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

DEV i32 group_start(const i32* offsets, i32 rows, i32 group) { return offsets ? offsets[group] : group * rows; }

// `starts[g]` becomes the number of row tiles before group g, up to and with `starts[groups]`;
// `tiles_of(count)` says how many a group of `count` rows has. Every thread of the block calls.
template <class TilesOf>
DEV void lay_tiles(i32* starts, const i32* offsets, i32 groups, i32 rows, TilesOf tiles_of) {
  if (warp_id() == 0) {
    i32 lane = lane_id(), before = 0;
    for (i32 base = 0; base < groups; base += 32) {
      i32 group = base + lane;
      i32 own = 0;
      if (group < groups)
        own = tiles_of(group_start(offsets, rows, group + 1) - group_start(offsets, rows, group));
      i32 sum = own;
      UNROLL for (i32 distance = 1; distance < 32; distance *= 2) {
        i32 left = shfl_up(sum, distance);
        if (lane >= distance) sum += left;
      }
      if (group < groups) starts[group] = before + sum - own;
      before += shfl(sum, 31);
    }
    if (lane == 0) starts[groups] = before;
  }
  __syncthreads();
}

// Tile `index` of all: group after group, inside a group band after band of BAND row tiles, inside a
// band column after column.
DEV Tile tile_at(const i32* starts, i32 groups, i32 columns, i32 index) {
  i32 low = 0, high = groups, unit = index / columns;
  // starts[low] <= unit < starts[high]; ends at the one group, not empty, that the tile is of.
  while (high - low > 1) {
    i32 middle = (low + high) / 2;
    if (starts[middle] <= unit)
      low = middle;
    else
      high = middle;
  }
  index -= starts[low] * columns;
  i32 first = index / (BAND * columns) * BAND;
  i32 height = min_(starts[low + 1] - starts[low] - first, BAND);
  index -= first * columns;
  return Tile{low, first + index % height, index / height};
}
