#include "attention.h"

#include "chunk.h"
#include "half.h"
#include "single_query.h"

namespace ring {

template <typename E>
void attend(const Attention<E>& a, const Parallel& parallel) {
  if (a.query_len == 1) return single_query(a, parallel);
  constexpr int64_t kQueries = kTilesTogether<E> * kTile;
  const int64_t tiles = (a.query_len * a.group() + kQueries - 1) / kQueries;
  // The last tiles see the most rows. They go first, so that no thread ends with a long one.
  parallel(tiles * a.num_kv_heads, [&](int64_t task) {
    attend_tiles(a, task % a.num_kv_heads, (tiles - 1 - task / a.num_kv_heads) * kQueries);
  });
}

template void attend(const Attention<float>&, const Parallel&);
template void attend(const Attention<Half>&, const Parallel&);
template void attend(const Attention<int8_t>&, const Parallel&);

}  // namespace ring
