// The sizes of a tile: queries computed at a time, and the rows they meet at a time.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace ring {

constexpr int kTileVecs = 3;
constexpr int kTile = kTileVecs * kWidth;
constexpr int64_t kBlock = 128;
constexpr int kSteps = kRegisters == 32 ? 8 : 4;  // rows, or elements of a row, against a tile at a time

}  // namespace ring
