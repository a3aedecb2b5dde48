// c10d's operators on the absent device, and on the host where a world is pretended.
//
// Every collective, whoever calls it (torch.distributed, functional collectives, DDP's reducer, DTensor), arrives
// at one of c10d's dispatcher operators with its process group. It is written down with the stream that it
// runs on: an asynchronous one runs on the group's own stream, which first waits for the stream that
// issued it, and whoever waits for the work makes its stream wait for that one. This is what ProcessGroupNCCL does.
// The values of small tensors that the host knows go to other ranks (values.py); reductions, and gathers of larger host
// tensors, are as if all ranks held the same.
#include "known.h"
#include "record.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

namespace wt {

namespace {
using Stack = torch::jit::Stack;

int32_t g_batch = 0;  // depth of a coalesced group of point-to-point messages

struct AbsentWork final : c10d::Work {
  int64_t handle;
  int16_t stream;
  bool host;      // the work runs on the host (gloo): waiting for it blocks the host
  bool blocking;  // a wait blocks the host too (barrier)
  bool joined;    // ran on the issuing stream: nothing to wait for
  std::vector<at::Tensor> outputs;

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    auto& r = recorder();
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    if (host) {
      r.add(SYNC, current_stream(), SYNC_WORK, handle);
    } else {
      if (!joined) r.add(WORK_WAIT, current_stream(), -1, handle);
      if (blocking) r.add(SYNC, current_stream(), SYNC_STREAM);
    }
    outputs.clear();
    return true;
  }
  void abort() override {}
  std::vector<at::Tensor> result() override { return outputs; }
  uint64_t getSequencenumber() const override { return static_cast<uint64_t>(handle); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    for (const auto& t : outputs)
      if (t.is_cuda() && devices.empty()) devices.push_back(t.device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    c10::List<at::Tensor> value;
    for (const auto& t : outputs) value.push_back(t);
    // The future remembers an event on the stream that is current when it completes: the collective's.
    int16_t before = current_stream();
    if (!host) set_current_stream(stream);
    future->markCompleted(c10::IValue(value));
    set_current_stream(before);
    return future;
  }
};

void collect(const c10::IValue& v, std::vector<at::Tensor>& out) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) out.push_back(v.toTensor());
  } else if (v.isList() || v.isTensorList()) {
    for (const auto& e : v.toListRef()) collect(e, out);
  }
}

int64_t bytes(const std::vector<at::Tensor>& tensors) {
  int64_t n = 0;
  for (const auto& t : tensors) n += t.numel() * static_cast<int64_t>(t.element_size());
  return n;
}

// What host tensors hold afterwards if every rank held what this one does.
void fill_host(const std::string& kind, std::vector<at::Tensor>& in, std::vector<at::Tensor>& out, int64_t size, int64_t rank, bool sum,
               const std::vector<int64_t>& splits) {
  at::NoGradGuard no_grad;
  if (kind == "all_reduce" || kind == "reduce") {
    if (sum) for (auto& t : out) t.mul_(size);
  } else if (kind == "all_gather" || kind == "gather" || kind == "scatter") {
    if (in.empty()) return;
    for (auto& t : out) {
      int64_t n = in[0].numel();
      if (n && t.numel() % n == 0) t.view({-1, n}).copy_(in[0].reshape({1, n}).expand({t.numel() / n, n}));
    }
  } else if (kind == "reduce_scatter") {
    for (size_t i = 0; i < out.size(); ++i) {
      auto& t = out[i];
      const auto& from = in.size() == out.size() ? in[i].reshape({-1}).narrow(0, rank * t.numel(), t.numel()) : in[rank].reshape({-1});
      t.copy_(from.reshape(t.sizes()));
      if (sum) t.mul_(size);
    }
  } else if (kind == "all_to_all") {
    if (in.size() != 1 || out.size() != 1) {  // every rank sends this one what it sends itself
      for (auto& t : out)
        if (rank < static_cast<int64_t>(in.size()) && t.numel() == in[rank].numel()) t.copy_(in[rank].reshape(t.sizes()));
      return;
    }
    int64_t begin = 0, rows = in[0].dim() ? in[0].size(0) / size : 0;
    if (splits.empty()) begin = rank * rows;
    else {
      for (int64_t i = 0; i < rank; ++i) begin += splits[i];
      rows = splits[rank];
    }
    const auto mine = in[0].dim() ? in[0].narrow(0, begin, rows) : in[0];
    if (out[0].numel() && out[0].numel() == mine.numel() * size) out[0].view({size, -1}).copy_(mine.reshape({1, -1}).expand({size, -1}));
    else if (out[0].numel() == in[0].numel()) out[0].copy_(in[0].reshape(out[0].sizes()));
  }
}

// The same for device tensors, where all inputs are known.
void fill_known(const std::string& kind, const std::vector<at::Tensor>& in, std::vector<at::Tensor>& out, int64_t size, int64_t rank,
                bool sum, const std::vector<int64_t>& splits) {
  std::vector<at::Tensor> from, to;
  bool known = true, declared = false;
  for (const auto& t : in) {
    auto held = known ? known_of(t) : nullptr;
    auto found = held ? values(held, Place(t)) : at::Tensor();
    known = found.defined();
    if (!known) break;
    declared |= held->declared;
    from.push_back(found.clone());
  }
  if (!known) {
    for (const auto& t : out) drop_shadow(t);
    return;
  }
  const bool in_place = in.size() == out.size() && !in.empty() && in[0].is_same(out[0]);
  for (size_t i = 0; i < out.size(); ++i)
    to.push_back(in_place ? from[i] : at::zeros(out[i].sizes(), out[i].options().device(at::kCPU)));
  fill_host(kind, from, to, size, rank, sum, splits);
  for (size_t i = 0; i < out.size(); ++i) set_values(out[i], to[i], declared);
}

// ------------------------------------------------------------------------- values that go from rank to rank
enum Travels { BROADCAST = 0, SCATTER = 1, SEND = 2, ALL_GATHER = 3, GATHER = 4 };  // KINDS of values.py

// The values of a tensor on the host, or undefined where nobody knows them. What was promised is asked for.
at::Tensor values_of(const at::Tensor& t) {
  at::NoGradGuard no_grad;
  if (!t.is_cuda()) return t.device().is_cpu() ? t.contiguous() : at::Tensor();
  auto known = known_of(t);
  auto found = known ? values(known, Place(t)) : at::Tensor();
  return found.defined() ? found.clone(at::MemoryFormat::Contiguous) : at::Tensor();
}

void say(int kind, const std::string& group, int64_t to, const at::Tensor& t) {
  auto known = values_of(t);
  recorder().say(kind, group.c_str(), to, known.defined() ? known.data_ptr() : nullptr, known.defined() ? static_cast<int64_t>(known.nbytes()) : 0);
}

void receive(int kind, const std::string& group, int64_t place, const at::Tensor& t, const at::Tensor& own) {
  at::NoGradGuard no_grad;
  auto& r = recorder();
  const int64_t promise = r.promise(kind, group.c_str(), place, own.defined() ? own.data_ptr() : nullptr,
                                    own.defined() ? static_cast<int64_t>(own.nbytes()) : 0);
  if (t.is_cuda()) return set_promise(t, promise);
  auto said = at::empty(t.sizes(), t.options());
  if (r.keep(promise, said.data_ptr(), static_cast<int64_t>(said.nbytes()))) t.copy_(said);
}

// Both sides count the same messages, because both see the same sizes. Returns whether this kind is carried.
bool carry(const std::string& kind, const c10d::ProcessGroup& group, int64_t peer, const std::vector<at::Tensor>& in,
           const std::vector<at::Tensor>& out) {
  if (!recorder().say || group.getSize() < 2) return false;
  const std::string name = group.getGroupName();
  const int64_t me = group.getRank();
  if (kind == "broadcast") {
    for (const auto& t : out) {
      if (!is_small(t)) { if (me != peer && t.is_cuda()) drop_shadow(t); }
      else if (me == peer) say(BROADCAST, name, -1, t);
      else receive(BROADCAST, name, peer, t, {});
    }
    return true;
  }
  if (kind == "send" || kind == "recv") {
    const auto& all = kind == "send" ? in : out;
    for (const auto& t : all) {
      if (!is_small(t) || peer < 0) drop_shadow(t);
      else if (kind == "send") say(SEND, name, peer, t);
      else receive(SEND, name, peer, t, {});
    }
    return true;
  }
  if (kind == "scatter") {
    if (out.empty() || !is_small(out[0])) return false;
    if (me != peer) {
      receive(SCATTER, name, peer, out[0], {});
      return true;
    }
    for (size_t i = 0; i < in.size(); ++i)
      if (static_cast<int64_t>(i) != me) say(SCATTER, name, static_cast<int64_t>(i), in[i]);
    auto own = in.size() == static_cast<size_t>(group.getSize()) ? values_of(in[me]) : at::Tensor();
    if (!out[0].is_cuda()) out[0].copy_(in[me]);
    else if (own.defined()) set_values(out[0], own);
    else drop_shadow(out[0]);
    return true;
  }
  if (kind == "all_gather" || kind == "gather") {
    if (in.size() != 1 || !is_small(in[0])) return false;
    const int which = kind == "gather" ? GATHER : ALL_GATHER;
    auto own = values_of(in[0]);
    recorder().say(which, name.c_str(), -1, own.defined() ? own.data_ptr() : nullptr, own.defined() ? static_cast<int64_t>(own.nbytes()) : 0);
    const bool each = out.size() == static_cast<size_t>(group.getSize()) && out[0].numel() == in[0].numel();
    for (size_t i = 0; i < out.size(); ++i) {
      if (own.defined() && (each || out.size() == 1)) receive(which, name, each ? static_cast<int64_t>(i) : -1, out[i], own);
      else drop_shadow(out[i]);
    }
    return true;
  }
  return false;
}

struct Collective final : c10::OperatorKernel {
  const char* kind;
  bool on_host;
  Collective(const char* k, bool host) : kind(k), on_host(host) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    auto& r = recorder();
    const auto& schema = op.schema();
    const size_t count = schema.arguments().size();
    Stack args(std::make_move_iterator(stack->end() - count), std::make_move_iterator(stack->end()));
    stack->resize(stack->size() - count);

    c10::intrusive_ptr<c10d::ProcessGroup> group;
    std::vector<at::Tensor> in, out;
    c10::IValue tensors_value, outputs_value;
    bool async = true, has_async = false, sum = false;
    int64_t peer = -1;
    std::vector<int64_t> splits;  // of what is sent
    for (size_t i = 0; i < count; ++i) {
      const auto& name = schema.arguments()[i].name();
      if (name == "process_group") group = args[i].toCustomClass<c10d::ProcessGroup>();
      else if (name == "asyncOp" || name == "async_op") { async = args[i].toBool(); has_async = true; }
      else if (name == "root_rank" || name == "dst" || name == "src") peer = args[i].toInt();
      else if (name == "reduce_op") sum = args[i].toCustomClass<c10d::ReduceOp>()->op_ == c10d::ReduceOp::SUM;
      else if (name == "tensors" || name == "tensor") { collect(args[i], in); out = in; tensors_value = args[i]; }
      else if (name == "input_split_sizes") splits = args[i].toIntVector();
      else if (name.find("output") == 0 && !args[i].isIntList()) {
        if (name.find("split") == std::string::npos) { collect(args[i], out); outputs_value = args[i]; }
      } else if (name.find("input") == 0 && name.find("split") == std::string::npos) collect(args[i], in);
    }
    const std::string what(kind);
    const bool message = what == "send" || what == "recv";
    const bool barrier = what == "barrier";
    if (!has_async) async = true;
    if (message) async = true;

    // Python is asked (here, and below for what is said) while the lock is free: who holds the interpreter may wait for it.
    mark_call_site();
    std::unique_lock<std::recursive_mutex> lock(r.mutex);
    auto work = c10::make_intrusive<AbsentWork>();
    work->host = on_host;
    work->blocking = barrier;
    work->outputs = out;
    work->handle = r.works++;
    const std::string group_name = group->getGroupName();
    // ProcessGroupNCCL: unbatched messages of a pair share a communicator; a batch is one launch in which they are independent.
    std::string stream_key = group_name;
    if (message) stream_key += "|" + std::to_string(peer) + (g_batch ? "|" + what : "");
    const int16_t issuer = current_stream();
    work->stream = on_host || !async ? issuer : comm_stream(stream_key);
    work->joined = work->stream == issuer && !on_host;

    if (r.on && !r.paused) {
      int64_t in_bytes = what == "recv" || barrier ? 0 : bytes(in);
      int64_t out_bytes = what == "send" || barrier ? 0 : bytes(out);
      std::string dtype = in.empty() ? (out.empty() ? "float32" : c10::toString(out[0].scalar_type())) : c10::toString(in[0].scalar_type());
      std::string row = "{\"k\":\"" + what + "\",\"g\":\"" + group_name + "\",\"i\":" + std::to_string(in_bytes) + ",\"o\":" +
                        std::to_string(out_bytes) + ",\"t\":\"" + dtype + "\",\"p\":" + std::to_string(peer) + ",\"h\":" +
                        (on_host ? "1" : "0") + "}";
      const int32_t number = r.collective_row(row);
      if (work->stream != issuer) {
        int32_t record = r.records++;
        r.add(RECORD, issuer, record);
        r.add(WAIT, work->stream, record);
      }
      r.add(COLLECTIVE, work->stream, number, work->handle);
      if (on_host && !async) r.add(SYNC, issuer, SYNC_WORK, work->handle);
      for (const auto* list : {&in, &out})
        for (const auto& t : *list) {
          int32_t block = t.is_cuda() ? block_of(t.storage().unsafeGetStorageImpl()) : -1;
          if (block >= 0) r.collective_blocks.push_back(block);
        }
    }
    lock.unlock();
    if (carry(what, *group, peer, in, out)) {}
    else if (on_host) fill_host(what, in, out, group->getSize(), group->getRank(), sum, splits);
    else if (!barrier) fill_known(what, in, out, group->getSize(), group->getRank(), sum, splits);

    for (const auto& ret : schema.returns()) {
      const auto type = ret.type()->str();
      if (type.find("Work") != std::string::npos) stack->push_back(c10::IValue(c10::static_intrusive_pointer_cast<c10d::Work>(work)));
      else if (!outputs_value.isNone()) stack->push_back(outputs_value);
      else stack->push_back(tensors_value);
    }
  }
};

const std::pair<const char*, const char*> KINDS[] = {
    {"broadcast_", "broadcast"}, {"allreduce_", "all_reduce"}, {"allreduce_coalesced_", "all_reduce"},
    {"allgather_", "all_gather"}, {"_allgather_base_", "all_gather"}, {"allgather_coalesced_", "all_gather"},
    {"allgather_into_tensor_coalesced_", "all_gather"}, {"reduce_scatter_", "reduce_scatter"},
    {"_reduce_scatter_base_", "reduce_scatter"}, {"reduce_scatter_tensor_coalesced_", "reduce_scatter"},
    {"reduce_", "reduce"}, {"gather_", "gather"}, {"scatter_", "scatter"}, {"alltoall_", "all_to_all"},
    {"alltoall_base_", "all_to_all"}, {"barrier", "barrier"}, {"monitored_barrier_", "barrier"},
    {"send", "send"}, {"recv_", "recv"}, {"recv_any_source_", "recv"},
};

}  // namespace
}  // namespace wt

extern "C" void wt_register_collectives() {
  static torch::Library device(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static torch::Library host(torch::Library::IMPL, "c10d", c10::DispatchKey::CPU, __FILE__, __LINE__);
  for (const auto& [op, kind] : wt::KINDS) {
    if (!c10::Dispatcher::singleton().findSchema({std::string("c10d::") + op, ""})) continue;
    device.impl(op, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<wt::Collective>(kind, false)));
    host.impl(op, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<wt::Collective>(kind, true)));
  }
}

extern "C" void wt_batch(int by) { wt::g_batch += by; }
