// The absent device: a CUDA guard, hooks and an allocator that satisfy libtorch without a driver.
//
// A CPU-only libtorch has every CUDA-independent layer (autograd, the dispatcher, c10d, DTensor), but no device
// guard, no hooks and no allocator for CUDA. These supply them, and stand before those of a CUDA build: streams and
// events are numbers that are written down, memory is an address that is never touched. Must be loaded before
// anything asks libtorch for its hooks, and before a CUDA build's libraries are.
#include "known.h"
#include "record.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ATen.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/autograd/function.h>
#include <ATen/record_function.h>

namespace wt {

Recorder& recorder() {
  static Recorder* r = new Recorder();  // never destroyed: tensors may be freed at exit
  return *r;
}

static thread_local int16_t t_stream = 0;
static thread_local c10::DeviceIndex t_device = -1;
static c10::DeviceIndex g_device = 0;  // what a thread starts with
static bool g_present = false;  // until a device is asked for, libtorch stays without CUDA
static int g_devices = 0;
static int g_capability = 90;
static int64_t g_streams = 0;

int16_t current_stream() { return t_stream; }
void set_current_stream(int16_t id) { t_stream = id; }
c10::DeviceIndex current_device() { return t_device < 0 ? g_device : t_device; }
void set_current_device(c10::DeviceIndex index) {
  if (index < 0) return;
  TORCH_CHECK(index < g_devices, "CUDA error: invalid device ordinal ", static_cast<int>(index), ": the emulated host has ", g_devices, " devices");
  t_device = index;
}

static uint64_t node_key(uint64_t thread, uint64_t sequence) { return (thread << 44) ^ sequence; }

void Recorder::add(uint8_t kind, int16_t stream, int32_t ref, int64_t value) {
  if (!on || paused) return;
  int32_t where = scope;
  uint8_t when = phase;
  // In backward the module is that of the forward operator whose autograd node runs now.
  if (auto node = torch::autograd::get_current_node()) {
    // Modules are entered in backward only where a checkpointed one runs its forward again.
    when = scope != 0 ? 4 : 2;
    if (scope == 0) {
      auto found = node_scope.find(node_key(node->thread_id(), node->sequence_nr()));
      if (found != node_scope.end()) where = found->second;
    }
  } else if (when == 0 && scope != 0) {
    when = 1;
  }
  if (recorded) ++*recorded;
  events.push_back(Event{kind, when, stream, where, ref, value});
}

static int32_t row_of(const std::string& text, std::unordered_map<std::string, int32_t>& rows, std::vector<std::string>& table) {
  auto [it, fresh] = rows.emplace(text, static_cast<int32_t>(table.size()));
  if (fresh) table.push_back(text);
  return it->second;
}

int32_t Recorder::operator_row(const std::string& text) { return row_of(text, operator_rows, operators); }
int32_t Recorder::collective_row(const std::string& text) { return row_of(text, collective_rows, collectives); }

int16_t comm_stream(const std::string& key) {
  auto& r = recorder();
  auto [it, fresh] = r.comm_streams.emplace(key, FIRST_COMM_STREAM + static_cast<int16_t>(r.comm_streams.size()));
  return it->second;
}

// The call of a torch.compile region that an operator of this moment belongs to: in backward, that of its forward.
static int32_t call_of_now() {
  auto& r = recorder();
  if (r.region) return r.call;
  if (auto node = torch::autograd::get_current_node()) {
    auto found = r.node_call.find(node_key(node->thread_id(), node->sequence_nr()));
    if (found != r.node_call.end()) return found->second;
  }
  return 0;
}

int64_t note_flow(const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written) {
  auto& r = recorder();
  if (!r.flows || !r.on || r.paused) return 0;
  const auto begin = static_cast<int64_t>(r.flow.size());
  r.flow.insert(r.flow.end(), {call_of_now(), static_cast<int64_t>(read.size()), static_cast<int64_t>(written.size())});
  for (const auto* list : {&read, &written})
    for (const auto& t : *list) {
      const bool here = t.defined() && t.is_cuda() && t.has_storage();
      r.flow.push_back(here ? block_of(t.storage().unsafeGetStorageImpl()) : -1);
      r.flow.push_back(here ? t.storage_offset() * static_cast<int64_t>(t.element_size()) : 0);
    }
  return begin + 1;
}

void mark_call_site() {
  auto& r = recorder();
  if (!r.on || r.paused || !r.find_call_site) return;
  int32_t row = r.find_call_site();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  if (row != r.call_site) {
    r.call_site = row;
    r.add(CALL, t_stream, row);
  }
}

// ---------------------------------------------------------------------------------------------- allocator
struct Block {
  int32_t id;
  int64_t bytes;
  KnownPtr known;
};

static void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) return;
  auto& r = recorder();
  {
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.allocated -= block->bytes;
    int32_t paused = r.paused;
    r.paused = 0;  // what was allocated while recording must be seen freed, whenever that is
    if (block->id >= 0) r.add(FREE, t_stream, block->id);
    r.paused = paused;
  }
  delete block;
}

constexpr size_t LARGE_BYTES = 1 << 20;  // as LARGE_BYTES in twin/memory/purpose.py

struct AbsentAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device where(c10::DeviceType::CUDA, current_device());
    if (bytes == 0) return c10::DataPtr(nullptr, where);
    auto& r = recorder();
    // Outside modules the script's line is all that tells what memory is for. Asked before the lock is taken: the
    // answer comes from Python, and who holds the interpreter may be waiting for the lock.
    if (bytes >= LARGE_BYTES && r.scope == 0 && r.phase == 0 && !torch::autograd::get_current_node()) mark_call_site();
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    // Addresses are unique for the life of the process and lie in no mapping: they are compared, never read.
    static uint64_t next = 0x0d00'0000'0000ull;
    uint64_t address = next;
    next += (bytes + 511) / 512 * 512;
    auto* block = new Block{-1, static_cast<int64_t>(bytes), {}};
    r.allocated += block->bytes;
    r.peak_allocated = std::max(r.peak_allocated, r.allocated);
    if (r.on && !r.paused) {
      block->id = r.blocks++;
      r.add(ALLOC, t_stream, block->id, static_cast<int64_t>(bytes));
    }
    return c10::DataPtr(reinterpret_cast<void*>(address), block, &free_block, where);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {}
};

static AbsentAllocator g_allocator;
c10::Allocator* absent_allocator() { return &g_allocator; }

int32_t block_of(const c10::StorageImpl* storage) {
  if (storage->data_ptr().get_deleter() != &free_block || !storage->data_ptr().get_context()) return -1;
  return static_cast<Block*>(storage->data_ptr().get_context())->id;
}

static std::unordered_map<int32_t, int64_t> g_written;  // bytes of the blocks that wt_append has allocated

// The storage's block, which nobody has written down, is the block of that number, which wt_append has.
static void adopt(c10::StorageImpl* storage, int32_t id) {
  auto* block = static_cast<Block*>(storage->data_ptr().get_context());
  block->id = id;
  recorder().allocated -= g_written[id];
  g_written.erase(id);
}

static void forget(c10::StorageImpl* storage) {
  const auto& data = storage->data_ptr();
  if (data.get_deleter() == &free_block && data.get_context()) static_cast<Block*>(data.get_context())->known = nullptr;
}

static Block* block_behind(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return nullptr;
  const auto& data = t.storage().data_ptr();
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

KnownPtr known_of(const at::Tensor& t) {
  auto* block = block_behind(t);
  return block ? block->known : nullptr;
}

void set_known(const at::Tensor& t, KnownPtr known) {
  if (auto* block = block_behind(t)) block->known = std::move(known);
}

void drop_shadow(const at::Tensor& t) { set_known(t, nullptr); }

bool is_small(const at::Tensor& t) { return t.numel() > 0 && t.numel() * static_cast<int64_t>(t.element_size()) <= SHADOW_BYTES; }

// -------------------------------------------------------------------------------------------------- guard
struct AbsentEvent {
  int32_t record = -1;
};

struct AbsentGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device old(c10::DeviceType::CUDA, current_device());
    set_current_device(d.index());
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, current_device()); }
  void setDevice(c10::Device d) const override { set_current_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) t_device = d.index(); }
  c10::Stream make(c10::Device d, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, d.index() < 0 ? current_device() : d.index()), id);
  }
  c10::Stream getStream(c10::Device d) const override { return make(d, t_stream); }
  c10::Stream getDefaultStream(c10::Device d) const override { return make(d, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override { return make(d, ++g_streams); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = make(s.device(), t_stream);
    t_stream = static_cast<int16_t>(s.id());
    return old;
  }
  // One device is enough for autograd: a rank drives a single device, whatever its index.
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(g_devices); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<AbsentEvent*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto& r = recorder();
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    if (!*event) *event = new AbsentEvent();
    auto* e = static_cast<AbsentEvent*>(*event);
    e->record = r.records++;
    r.add(RECORD, static_cast<int16_t>(stream.id()), e->record);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto& r = recorder();
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.add(WAIT, static_cast<int16_t>(stream.id()), static_cast<AbsentEvent*>(event)->record);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  bool isStreamCapturing(const c10::Stream&) const { return false; }  // an override, except of 2.11, which does not ask
  void synchronizeStream(const c10::Stream& stream) const override { sync(static_cast<int16_t>(stream.id()), SYNC_STREAM); }
  void synchronizeEvent(void* event) const override {
    if (event) sync(t_stream, static_cast<AbsentEvent*>(event)->record);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { sync(t_stream, SYNC_DEVICE); }
  void sync(int16_t stream, int32_t ref) const {
    auto& r = recorder();
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.add(SYNC, stream, ref);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_deleter() != &free_block || !data.get_context()) return;
    auto& r = recorder();
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    int32_t id = static_cast<Block*>(data.get_context())->id;
    if (id >= 0) r.add(RECORD_STREAM, static_cast<int16_t>(stream.id()), id);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};

// -------------------------------------------------------------------------------------------------- hooks
struct AbsentHooks final : at::CUDAHooksInterface {
  AbsentHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return g_present; }
  bool hasCUDART() const override { return g_present; }
  bool hasCuDNN() const override { return g_present; }
  bool hasCuBLASLt() const override { return g_present; }
  bool compiledWithCuDNN() const override { return g_present; }
  long versionCuDNN() const override { return 91002; }
  long versionRuntimeCuDNN() const override { return 91002; }
  std::string showConfig() const override { return "  - CUDA Runtime 13.0\n  - CuDNN 91.0.2\n"; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return g_capability >= 80; }
  double batchnormMinEpsilonCuDNN() const override { return 1e-5; }
  bool isBuilt() const override { return g_present; }
  bool isAvailable() const override { return g_present; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(g_devices); }
  int getNumGPUs() const override { return g_devices; }
  c10::DeviceIndex current_device() const override { return wt::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return wt::current_device(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto old = wt::current_device();
    set_current_device(d);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(c10::DeviceType::CUDA, wt::current_device()); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &g_allocator; }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

// ---------------------------------------------------------------------- the attention kernel that is chosen
// The order of a CUDA build (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): flash, memory-efficient, math.
int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double>, bool gqa) {
  const auto& context = at::globalContext();
  const auto dtype = q.scalar_type();
  const bool half = dtype == at::kHalf || (dtype == at::kBFloat16 && g_capability >= 80);
  const int64_t head = q.size(-1);
  const bool shapes = q.dim() == 4 && k.dim() == 4 && q.size(-2) > 0 && k.size(-2) > 0;
  const bool same_heads = shapes && q.size(1) == k.size(1);
  const bool same_batch = shapes && q.size(0) == k.size(0) && q.size(0) == v.size(0);
  const bool square = shapes && q.size(-2) == k.size(-2);
  // The flash kernel pads heads to a multiple of 8 itself; its causal mask needs as many queries as keys.
  if (context.userEnabledFlashSDP() && same_batch && g_capability >= 80 && half && !mask && head <= 256 &&
      v.size(-1) == head && (same_heads || gqa) && !(causal && !square))
    return 1;
  const bool efficient_dtype = half || dtype == at::kFloat;
  if (context.userEnabledMemEfficientSDP() && same_batch && same_heads && !gqa && efficient_dtype && g_capability >= 50 &&
      head % (dtype == at::kFloat ? 4 : 8) == 0 && !(mask && mask->requires_grad()))
    return 2;
  return 0;
}

void note_forward_node() {
  auto& r = recorder();
  if ((r.scope == 0 && r.region == 0) || torch::autograd::get_current_node()) return;
  uint64_t sequence = at::sequence_number::peek();
  if (sequence == 0) return;
  const auto key = node_key(at::RecordFunction::currentThreadId(), sequence - 1);
  if (r.scope) r.node_scope[key] = r.scope;
  if (r.region && sequence > r.call_sequence) r.node_call[key] = r.call;
}

static void resize_storage(c10::StorageImpl* storage, int64_t bytes) {
  if (bytes == 0) {
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  } else {
    storage->set_data_ptr_noswap(g_allocator.allocate(static_cast<size_t>(bytes)));
  }
  storage->set_nbytes(static_cast<size_t>(bytes));
}

// DDP's reducer wants a timer of its device; it has nothing to time here.
struct AbsentTimer final : c10d::Timer {
  explicit AbsentTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace wt

// A CUDA build registers a timer and hooks of its own when it is loaded, which is after this: the preferred ones stay.
static const bool g_registered = [] {
  c10d::TimerRegistry()->Register(
      c10::kCUDA, [](c10::Device d) -> std::unique_ptr<c10d::Timer> { return std::make_unique<wt::AbsentTimer>(d); },
      c10::REGISTRY_PREFERRED);
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs a) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<wt::AbsentHooks>(a); },
      c10::REGISTRY_PREFERRED);
  return true;
}();

extern "C" {

int wt_hooks_ready() { return dynamic_cast<const wt::AbsentHooks*>(&at::detail::getCUDAHooks()) != nullptr; }

void wt_device(int devices, int capability, int current) {
  wt::g_present = true;
  wt::g_devices = devices;
  wt::g_capability = capability;
  wt::g_device = static_cast<c10::DeviceIndex>(current);
  wt::t_device = -1;
  static wt::AbsentGuard* guard = nullptr;
  if (!guard) {
    guard = new wt::AbsentGuard();
    c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, guard);
    c10::SetAllocator(c10::DeviceType::CUDA, &wt::g_allocator, 255);  // above a CUDA build's own
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&wt::choose_attention);
  }
}

void wt_storage_resize(void* storage, int64_t bytes) { wt::resize_storage(static_cast<c10::StorageImpl*>(storage), bytes); }
void wt_forget(void* storage) { wt::forget(static_cast<c10::StorageImpl*>(storage)); }
int wt_storage_block(void* storage) { return wt::block_of(static_cast<c10::StorageImpl*>(storage)); }

void wt_record_on(int on) { wt::recorder().on = on; }
void wt_pause(int by) { wt::recorder().paused += by; }
void wt_scope(int scope) { wt::recorder().scope = scope; }
void wt_phase(int phase) { wt::recorder().phase = static_cast<uint8_t>(phase); }
void wt_region(int region) {  // 0 leaves it
  auto& r = wt::recorder();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  r.region = region;
  r.call = region ? ++r.calls : 0;
  r.call_sequence = at::sequence_number::peek();
  r.flows |= region != 0;
}
// Where the flow of an operator is written that reads and then writes these blocks, -1 for none (0: nowhere yet).
int64_t wt_flow(const int64_t* blocks, int reads, int writes) {
  auto& r = wt::recorder();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  const int64_t at = wt::note_flow({}, {});
  if (!at) return 0;
  r.flow[at] = reads;
  r.flow[at + 1] = writes;
  for (int i = 0; i < reads + writes; ++i) r.flow.insert(r.flow.end(), {blocks[i], 0});
  return at;
}
int64_t wt_flow_count() { return static_cast<int64_t>(wt::recorder().flow.size()); }
const int64_t* wt_flows() { return wt::recorder().flow.data(); }
void wt_recorded(int64_t* word) { wt::recorder().recorded = word; }

void wt_callbacks(int32_t (*site)(), void (*read)(const char*, double)) {
  wt::recorder().find_call_site = site;
  wt::recorder().host_read = read;
}
void wt_values(decltype(wt::Recorder::say) say, decltype(wt::Recorder::promise) promise, decltype(wt::Recorder::keep) keep) {
  wt::recorder().say = say;
  wt::recorder().promise = promise;
  wt::recorder().keep = keep;
}
void wt_event(int kind, int stream, int ref, int64_t value) {
  std::lock_guard<std::recursive_mutex> lock(wt::recorder().mutex);
  wt::recorder().add(static_cast<uint8_t>(kind), static_cast<int16_t>(stream), ref, value);
}
int wt_exchange_device(int index) {  // -1 asks only
  int before = wt::current_device();
  wt::set_current_device(static_cast<c10::DeviceIndex>(index));
  return before;
}
int wt_stream() { return wt::current_stream(); }
int64_t wt_allocated(int peak) { return peak ? wt::recorder().peak_allocated : wt::recorder().allocated; }
void wt_reset_peak() { wt::recorder().peak_allocated = wt::recorder().allocated; }
int64_t wt_event_count() { return static_cast<int64_t>(wt::recorder().events.size()); }
const void* wt_events() { return wt::recorder().events.data(); }
int wt_row_count(int table) {
  auto& r = wt::recorder();
  return static_cast<int>(table == 0 ? r.operators.size() : r.collectives.size());
}
const char* wt_row(int table, int row) {
  auto& r = wt::recorder();
  if (table < 2) return (table == 0 ? r.operators[row] : r.collectives[row]).c_str();
  for (const auto& [key, stream] : r.comm_streams)
    if (stream == row) return key.c_str();
  return "";
}
// The number of a row of the operators (0), of the collectives (1), of the key of a group's stream (2).
int wt_row_of(int table, const char* text) {
  auto& r = wt::recorder();
  return table == 0 ? r.operator_row(text) : table == 1 ? r.collective_row(text) : wt::comm_stream(text);
}
int wt_add_operator(const char* row) { return wt::recorder().operator_row(row); }
int wt_new_block() { return wt::recorder().blocks++; }
void wt_note_node() { wt::note_forward_node(); }
int64_t wt_collective_block_count() { return static_cast<int64_t>(wt::recorder().collective_blocks.size()); }
const int64_t* wt_collective_blocks() { return wt::recorder().collective_blocks.data(); }

// What chunks.py needs to write a micro-batch down again that was not run.

// The next number of a block (0), an event record (1) or a work handle (2), of which so many are taken.
int64_t wt_take(int what, int64_t count) {
  auto& r = wt::recorder();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  const int64_t first = what == 0 ? r.blocks : what == 1 ? r.records : r.works;
  if (what == 0) r.blocks += static_cast<int32_t>(count);
  else if (what == 1) r.records += static_cast<int32_t>(count);
  else r.works += count;
  return first;
}
void wt_append(const wt::Event* events, int64_t count) {
  auto& r = wt::recorder();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  if (r.recorded) *r.recorded += count;
  r.events.insert(r.events.end(), events, events + count);
  for (auto* e = events; e != events + count; ++e) {
    if (e->kind == wt::ALLOC) r.allocated += wt::g_written[e->ref] = e->value;
    if (e->kind == wt::FREE) r.allocated -= wt::g_written[e->ref], wt::g_written.erase(e->ref);
    r.peak_allocated = std::max(r.peak_allocated, r.allocated);
  }
}
void wt_communicated(const int64_t* blocks, int64_t count) {
  auto& r = wt::recorder();
  r.collective_blocks.insert(r.collective_blocks.end(), blocks, blocks + count);
}
void wt_adopt(void* storage, int block) { wt::adopt(static_cast<c10::StorageImpl*>(storage), block); }
void wt_forget_site() { wt::recorder().call_site = -1; }
}
