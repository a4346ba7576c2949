// The queries that attention of several works on at a time, and the rows that go by them.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace ring {

constexpr int kTileVecs = 3;
constexpr int kTile = kTileVecs * kWidth;
constexpr int64_t kBlock = 128;
constexpr int kSteps = kRegisters == 32 ? 8 : 4;  // rows, or numbers of a row, against a tile at a time

}  // namespace ring
