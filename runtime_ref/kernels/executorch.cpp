// The attention of this folder under the name `llama::custom_sdpa`, which exported programs call.
//
// A registry holds one kernel of a name, and ExecuTorch's own may be in it already, so that its entry is taken over in
// place. What this kernel does not handle goes to the one that it replaced.
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "ring_kernels.h"

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::OpFunction;
using executorch::runtime::Span;

constexpr const char* kName = "llama::custom_sdpa.out";
OpFunction replaced = nullptr;

// ExecuTorch's pool gives every thread an equal stretch; tasks differ, so a thread takes the next one when it is done.
void run_parallel(int64_t count, const std::function<void(int64_t)>& task) {
  std::atomic<int64_t> next{0};
  executorch::extension::parallel_for(0, count, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) task(i);
  });
}

bool plain(const Tensor& t, ssize_t dim) {
  return t.scalar_type() == ScalarType::Float && t.dim() == dim &&
      executorch::runtime::is_contiguous_dim_order(t.dim_order().data(), t.dim());
}

// custom_sdpa(query, key, value, start_pos, attn_mask=None, dropout_p=0, is_causal=False, scale=None, *, out)
void custom_sdpa(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Tensor query = stack[0]->toTensor(), keys = stack[1]->toTensor(), values = stack[2]->toTensor();
  const int64_t start = stack[3]->toInt();
  const auto mask = stack[4]->toOptional<Tensor>();
  const double dropout = stack[5]->toDouble();
  const bool causal = stack[6]->toBool();
  const auto scale = stack[7]->toOptional<double>();
  Tensor out = stack[8]->toTensor();

  const int64_t query_len = query.dim() == 4 ? query.size(1) : 0;
  const bool ours = plain(query, 4) && plain(keys, 4) && plain(values, 4) && plain(out, 4) && query.size(0) == 1 &&
      keys.size(0) == 1 && values.size(0) == 1 && keys.size(2) == values.size(2) && keys.size(1) == values.size(1) &&
      keys.size(3) == query.size(3) && values.size(3) == query.size(3) && query.size(2) % keys.size(2) == 0 &&
      query_len > 0 && dropout == 0.0 &&
      (mask ? !causal && plain(*mask, 2) && mask->size(0) == query_len && mask->size(1) == keys.size(1)
            : start >= 0 && start + query_len <= keys.size(1));
  if (!ours) {
    if (replaced) return replaced(context, stack);
    return context.fail(Error::InvalidArgument);
  }
  if (executorch::runtime::resize_tensor(out, query.sizes()) != Error::Ok) return context.fail(Error::InvalidArgument);
  ring::Attention a;
  a.query_len = query_len;
  a.rows = keys.size(1);
  a.num_heads = query.size(2);
  a.num_kv_heads = keys.size(2);
  a.head_dim = query.size(3);
  a.query = query.const_data_ptr<float>();
  a.keys = keys.const_data_ptr<float>();
  a.values = values.const_data_ptr<float>();
  a.mask = mask ? mask->const_data_ptr<float>() : nullptr;
  a.start = start;
  a.causal = causal;
  a.scale = scale ? static_cast<float>(*scale) : 1.0f / std::sqrt(static_cast<float>(a.head_dim));
  a.out = out.mutable_data_ptr<float>();
  ring::attend(a, run_parallel);
}

Kernel* entry() {
  const auto kernels = executorch::runtime::get_registered_kernels();
  for (const Kernel& kernel : kernels) {
    if (std::strcmp(kernel.name_, kName) == 0) return const_cast<Kernel*>(&kernel);
  }
  return nullptr;
}

}  // namespace

int ring_use_attention(int use) {
  Kernel* found = entry();
  if (!found) {
    if (!use) return 0;
    return executorch::runtime::register_kernel(Kernel(kName, custom_sdpa)) == Error::Ok;
  }
  if (found->op_ != custom_sdpa) replaced = found->op_;
  if (use) found->op_ = custom_sdpa;
  else if (replaced) found->op_ = replaced;
  return found->op_ == custom_sdpa;
}
