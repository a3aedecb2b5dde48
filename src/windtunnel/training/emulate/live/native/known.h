// Values of device tensors that are known though nothing is computed on the device.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace wt {

// Where a tensor lies in its storage.
struct Place {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;

  Place() = default;
  explicit Place(const at::Tensor& t)
      : sizes(t.sizes().vec()), strides(t.strides().vec()), offset(t.storage_offset()), dtype(t.scalar_type()) {}
};

// Work that is done on the host, once, when the first of its results is asked for.
struct Call {
  std::function<std::vector<at::Tensor>()> run;
  std::vector<at::Tensor> results;
  at::Tensor sure;  // where the first result is known; undefined: everywhere
};

// What a block of device memory holds: host values, or the result of a call, laid over what it held before.
struct Known {
  at::Tensor flat;  // the whole block, once it is worked out
  at::Tensor sure;  // of each byte, whether it is known; undefined: all are
  std::shared_ptr<Call> call;
  size_t result = 0;
  Place place;
  std::shared_ptr<Known> before;
  int64_t bytes = 0;
  bool declared = false;  // comes from what the device is only taken to have chosen
  int depth = 0;
};
using KnownPtr = std::shared_ptr<Known>;

KnownPtr known_of(const at::Tensor& t);
void set_known(const at::Tensor& t, KnownPtr known);
// The values at a place of a block, as a host tensor that may share memory; undefined where they cannot be worked out.
at::Tensor values(const KnownPtr& known, const Place& place);
// From now on `t` holds a result of a call. `before`: what was known of its block, which counts where it does not fill it.
void set_result(const at::Tensor& t, std::shared_ptr<Call> call, size_t result, bool declared, int depth, const KnownPtr& before);
// What the host is given of a tensor, or undefined; Python is told when it is declared and not true.
at::Tensor host_values(const at::Tensor& t);
bool is_known(const at::Tensor& t);
// `t` holds the values of `host`, of the same shape, from now on.
void set_values(const at::Tensor& t, const at::Tensor& host, bool declared = false);
// `t` holds what `source` holds, as a copy between them leaves it.
void copy_values(const at::Tensor& t, const at::Tensor& source);

// A call whose arguments are all known, taken before it changes any of them.
struct Follow {
  std::shared_ptr<Call> call;
  bool declared = false;
  int depth = 0;
  bool chosen = false;  // declared choices: the last result, the rest of them is not known
  std::vector<KnownPtr> before;  // for each written argument

  explicit operator bool() const { return call != nullptr; }
};

// How an operator's results can be known; made once for each operator.
class Follower {
 public:
  void prepare(const c10::OperatorHandle& op, const std::string& name, const std::vector<int>& written, bool views);
  // Must be called before the call's effects; empty where something that it reads is not known.
  Follow take(const c10::OperatorHandle& op, const torch::jit::Stack& args) const;
  // Hands the results on. `returned`: all tensors that the call returns, undefined where it is an argument.
  void give(const Follow& follow, const torch::jit::Stack& args, const std::vector<at::Tensor>& returned) const;
  bool sized_by_values = false;  // how large its result is depends on what is in its arguments

 private:
  enum Pick { NONE, TOPK, SORT, REDUCE, DRAW } pick_ = NONE;
  enum Logic { PLAIN, OR, AND, SAME, ANY, ALL } logic_ = PLAIN;
  bool follows_ = false, factory_ = false, histogram_ = false;
  std::vector<int> written_;
  std::vector<bool> unread_;  // for each argument: it is only written
  Follow choose(const torch::jit::Stack& args) const;
  Follow reason(const c10::OperatorHandle& op, const torch::jit::Stack& args) const;
};

}  // namespace wt
