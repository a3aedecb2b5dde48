// Pinned host memory: ordinary memory whose addresses are remembered, so that ``is_pinned`` tells the truth and a
// copy knows whether it may overlap.
#include "record.h"

#include <map>

#include <c10/core/CPUAllocator.h>

namespace wt {
namespace {

std::mutex g_mutex;
std::map<const char*, size_t> g_ranges;  // begin -> bytes

void unpin(void* context) {
  auto* memory = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_ranges.erase(static_cast<const char*>(memory->get()));
  }
  delete memory;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    void* address = memory->get();
    if (address) {
      std::lock_guard<std::mutex> lock(g_mutex);
      g_ranges[static_cast<const char*>(address)] = bytes;
    }
    return c10::DataPtr(address, memory, &unpin, c10::Device(c10::DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

}  // namespace

at::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();  // never destroyed: tensors may be freed at exit
  return allocator;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto after = g_ranges.upper_bound(static_cast<const char*>(pointer));
  if (after == g_ranges.begin()) return false;
  auto [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(pointer) < begin + bytes;
}

}  // namespace wt
