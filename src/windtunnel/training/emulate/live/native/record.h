// What the absent device writes down: one compact event after another, and text tables of what is distinct.
//
// The layout of Event is that of the EVENT dtype in graph.py. Everything is guarded by one mutex: events come
// from the script's thread and from autograd's device thread, which never issue work at the same time, but a
// tensor may be freed by any thread.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace wt {

#pragma pack(push, 1)
struct Event {
  uint8_t kind;
  uint8_t phase;
  int16_t stream;
  int32_t scope;
  int32_t ref;
  int64_t value;
};
#pragma pack(pop)
static_assert(sizeof(Event) == 20, "EVENT in graph.py has 20 bytes");

enum Kind : uint8_t {
  OP = 0, ALLOC = 1, FREE = 2, COLLECTIVE = 3, WORK_WAIT = 4, RECORD = 5, WAIT = 6, SYNC = 7, RECORD_STREAM = 8,
  STEP = 9, CALL = 10,
};

// SYNC's ref where it is not an event record
constexpr int32_t SYNC_DEVICE = -1, SYNC_STREAM = -2, SYNC_WORK = -3;
constexpr int16_t FIRST_COMM_STREAM = 1000;

struct Recorder {
  std::recursive_mutex mutex;
  bool on = false;
  std::vector<Event> events;
  std::vector<std::string> operators;    // JSON, one row each
  std::vector<std::string> collectives;  // JSON, one row each
  std::unordered_map<std::string, int32_t> operator_rows, collective_rows;
  std::unordered_map<std::string, int16_t> comm_streams;
  std::unordered_map<uint64_t, int32_t> node_scope;  // (forward thread, autograd sequence number) -> scope
  std::vector<int64_t> collective_blocks;            // blocks that a collective reads or writes
  // From the first torch.compile region on, which blocks each operator reads and writes; an OP event's value is one
  // more than where its entry begins, 0 without one. An entry: the call of a region that the operator belongs to (0:
  // none), how many tensors it reads and writes, and of each its block (-1: none that is known) and byte offset.
  std::vector<int64_t> flow;
  bool flows = false;
  std::unordered_map<uint64_t, int32_t> node_call;   // as node_scope: the call of a region that made the node
  int32_t call = 0, calls = 0;                       // of regions: the one that the host is in, and how many there were
  uint64_t call_sequence = 0;                        // the first autograd sequence number of this call
  int32_t scope = 0;
  uint8_t phase = 0;
  int32_t region = 0;   // number of the torch.compile region the host is in
  int32_t paused = 0;
  int32_t blocks = 0;
  int32_t records = 0;
  int64_t works = 0;
  int32_t call_site = -1;
  int64_t allocated = 0, peak_allocated = 0;
  int64_t* recorded = nullptr;             // counts events in memory that the parent process sees, too
  int32_t (*find_call_site)() = nullptr;   // set by Python: row of the call-site table for the running frame
  // Set by Python: device data was read by the host. What stands for it ("": it is known), and the answer as a number.
  void (*host_read)(const char* what, double answer) = nullptr;
  // Set by Python, which carries the values of small tensors from rank to rank (values.py tells of the arguments).
  void (*say)(int kind, const char* group, int64_t to, const void* data, int64_t bytes) = nullptr;
  int64_t (*promise)(int kind, const char* group, int64_t place, const void* own, int64_t bytes) = nullptr;
  int (*keep)(int64_t promise, void* into, int64_t bytes) = nullptr;

  void add(uint8_t kind, int16_t stream, int32_t ref, int64_t value = 0);
  void read(const char* what, double answer = 0) const {
    if (on && !paused && host_read) host_read(what, answer);
  }
  int32_t operator_row(const std::string& text);
  int32_t collective_row(const std::string& text);
};

Recorder& recorder();
int16_t current_stream();            // of this thread
void set_current_stream(int16_t id); // of this thread
c10::DeviceIndex current_device();   // of this thread
void set_current_device(c10::DeviceIndex index);  // throws where the host has no such device
int16_t comm_stream(const std::string& key);
void mark_call_site();

// Work on a device that is not the current one, as PyTorch's generated kernels do: that of the arguments.
struct OnDevice {
  c10::DeviceIndex before = current_device();
  explicit OnDevice(c10::DeviceIndex index) { if (index >= 0 && index != before) set_current_device(index); }
  ~OnDevice() { if (current_device() != before) set_current_device(before); }
};
void note_forward_node();            // remembers the module of the autograd node that the next operator makes

c10::Allocator* absent_allocator();
at::Allocator* pinned_allocator();
at::Generator new_generator(c10::DeviceIndex index);
const at::Generator& default_generator(c10::DeviceIndex index);
bool is_pinned(const void* pointer);
// Which attention kernel a CUDA build would take, as SDPBackend counts them: 1 flash, 2 memory-efficient, 0 math.
int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool gqa);
int32_t block_of(const c10::StorageImpl* storage);
int64_t note_flow(const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written);

constexpr int64_t SHADOW_BYTES = 1 << 16;  // tensors of fractions whose values are followed, see known.h
void drop_shadow(const at::Tensor& t);  // something that is not known was written to it
bool is_small(const at::Tensor& t);     // its values may travel to other ranks
void set_promise(const at::Tensor& t, int64_t promise);  // t holds what another rank has promised, 0 for nothing known

// Host tensors that hold zeros in the place of what the device has, and copies of them.
bool is_unknown(const at::Tensor& host);
void mark_unknown(const at::Tensor& host);

}  // namespace wt
