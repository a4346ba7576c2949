#include "attention.h"

#include "chunk.h"
#include "half.h"
#include "single_query.h"

namespace ring {

template <typename E>
void attend(const Attention<E>& a, const Parallel& parallel) {
  if (a.query_len == 1) return single_query(a, parallel);
  const int64_t queries = a.query_len * a.group();
  const int64_t tiles = (queries + kTile - 1) / kTile;
  // The last tiles see the most rows: they go first, so that no thread is left with one of them at the end.
  parallel(tiles * a.num_kv_heads, [&](int64_t task) {
    attend_tile(a, task % a.num_kv_heads, (tiles - 1 - task / a.num_kv_heads) * kTile);
  });
}

template void attend(const Attention<float>&, const Parallel&);
template void attend(const Attention<Half>&, const Parallel&);
template void attend(const Attention<int8_t>&, const Parallel&);

}  // namespace ring
