// Large host tensors take no memory and no time until something looks at them.
//
// A model is built on the host, filled with random numbers and moved to the device, where nothing has values: nobody ever reads
// the numbers. So a fill of a whole large tensor (random, a constant, or a copy of one that waits too) is written down, and its
// pages are taken away. Whatever touches one, by an operator, NumPy or a pointer, makes the processor fault, and then
// the numbers around it are made: as many, in the same place, and the same in every run. Each is drawn by its place from a
// seed that the fill takes from its generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so they are
// other numbers of the same distribution than the operator would have drawn. Only the kernel, asked to read or write
// pages that wait (a file's `write`), answers with an error instead: who hands them to it touches them first (`untouched.py`).
#include "record.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/native/Math.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/fill_native.h>
#include <ATen/ops/normal_native.h>
#include <ATen/ops/uniform_native.h>
#include <ATen/ops/zero_native.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <map>

#include <sched.h>
#include <sys/mman.h>

namespace wt {
namespace {

constexpr size_t LARGE = 1 << 20;       // bytes of a tensor that may wait
constexpr int64_t CHUNK = 1 << 18;      // numbers that are made at once: whole pages of every dtype
constexpr size_t PAGE = 1 << 16;        // the largest that there is
constexpr size_t CASTS = 4;             // dtypes that a number passes

struct Recipe {
  enum What { CONSTANT, UNIFORM, NORMAL, TRUNCATED } what = CONSTANT;
  double a = 0, b = 0, low = 0, high = 0;  // value; from, to; mean, deviation; and where it is cut off
  uint64_t seed = 0;
  std::vector<c10::ScalarType> casts;      // the last is the tensor's own
};

struct Region {
  size_t bytes = 0;
  Recipe recipe;
  std::vector<bool> waiting;  // of each chunk; empty where all is ordinary memory

  size_t chunk_bytes() const { return CHUNK * c10::elementSize(recipe.casts.back()); }
};

std::map<char*, Region>& regions() {
  static auto* all = new std::map<char*, Region>();
  return *all;
}

// Held for moments, also by who handles a fault: nothing that it guards lies in memory that waits.
std::atomic_flag g_busy = ATOMIC_FLAG_INIT;
struct Lock {
  Lock() { while (g_busy.test_and_set(std::memory_order_acquire)) sched_yield(); }
  ~Lock() { g_busy.clear(std::memory_order_release); }
};

std::pair<char* const, Region>* region_at(const void* address) {
  auto after = regions().upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == regions().begin()) return nullptr;
  auto& found = *std::prev(after);
  return static_cast<const char*>(address) < found.first + found.second.bytes ? &found : nullptr;
}

double cut(const Recipe& r, double uniform) {  // as torch.nn.init.trunc_normal_ does it
  auto below = [&](double x) { return (1 + std::erf((x - r.a) / r.b / std::sqrt(2.0))) / 2; };
  const double low = 2 * below(r.low) - 1, high = 2 * below(r.high) - 1;
  return std::clamp(r.a + r.b * std::sqrt(2.0) * calc_erfinv(low + (high - low) * uniform), r.low, r.high);
}

// Numbers `first` to `first + 3`.
void draw(const Recipe& r, int64_t first, double (&out)[4]) {
  if (r.what == Recipe::CONSTANT) {
    for (double& x : out) x = r.a;
    return;
  }
  at::Philox4_32 engine(r.seed, static_cast<uint64_t>(first));
  double u[4];
  for (double& x : u) x = (engine() + 0.5) / 4294967296.0;
  for (int i = 0; i < 4; ++i) {
    if (r.what == Recipe::UNIFORM) out[i] = r.a + (r.b - r.a) * u[i];
    else if (r.what == Recipe::TRUNCATED) out[i] = cut(r, u[i]);
    else {
      const double angle = 2 * M_PI * u[i | 1], length = std::sqrt(-2 * std::log(u[i & ~1]));
      out[i] = r.a + r.b * length * (i & 1 ? std::sin(angle) : std::cos(angle));
    }
  }
}

double cast(double x, c10::ScalarType to) {
  if (to == at::kFloat) return static_cast<float>(x);
  if (to == at::kHalf) return static_cast<float>(c10::Half(static_cast<float>(x)));
  if (to == at::kBFloat16) return static_cast<float>(c10::BFloat16(static_cast<float>(x)));
  return x;
}

void store(void* memory, int64_t index, double x, c10::ScalarType dtype) {
  if (dtype == at::kFloat) static_cast<float*>(memory)[index] = static_cast<float>(x);
  else if (dtype == at::kHalf) static_cast<c10::Half*>(memory)[index] = static_cast<float>(x);
  else if (dtype == at::kBFloat16) static_cast<c10::BFloat16*>(memory)[index] = static_cast<float>(x);
  else static_cast<double*>(memory)[index] = x;
}

// Make the numbers of a chunk elsewhere and put the memory in its place, so that no other thread sees half of them.
void make_chunk(char* begin, Region& region, size_t chunk) {
  const size_t size = region.chunk_bytes(), at = chunk * size, bytes = std::min(size, region.bytes - at);
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) abort();
  const auto& r = region.recipe;
  const auto dtype = r.casts.back();
  const int64_t count = static_cast<int64_t>(bytes / c10::elementSize(dtype));
  double out[4];
  for (int64_t i = 0; i < count; i += 4) {
    draw(r, static_cast<int64_t>(chunk) * CHUNK + i, out);
    for (int64_t j = 0; j < 4; ++j) {
      for (auto to : r.casts) out[j] = cast(out[j], to);
      store(made, i + j, out[j], dtype);
    }
  }
  if (mremap(made, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, begin + at) == MAP_FAILED) abort();
  region.waiting[chunk] = false;
}

bool touch(void* address) {
  Lock lock;
  auto* found = region_at(address);
  if (!found || found->second.waiting.empty()) return false;
  const size_t chunk = (static_cast<char*>(address) - found->first) / found->second.chunk_bytes();
  if (found->second.waiting[chunk]) make_chunk(found->first, found->second, chunk);
  return true;
}

struct sigaction g_before;

void on_fault(int, siginfo_t* info, void*) {
  const int kept = errno;
  // What is not ours meets whoever was there before, when the instruction runs again.
  if (!touch(info->si_addr)) sigaction(SIGSEGV, &g_before, nullptr);
  errno = kept;
}

void lay(char* begin, size_t bytes, int protection) {  // untouched pages
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  TORCH_CHECK(mmap(begin, bytes, protection, flags, -1, 0) == begin, "windtunnel: the host's memory cannot be mapped");
}

// The region that a tensor has for itself alone, or null.
std::pair<char* const, Region>* whole(const at::Tensor& t) {
  if (!t.device().is_cpu() || !t.has_storage() || t.storage_offset() != 0 || !t.is_non_overlapping_and_dense()) return nullptr;
  if (t.nbytes() < LARGE || t.nbytes() != t.storage().nbytes()) return nullptr;
  auto found = regions().find(static_cast<char*>(const_cast<void*>(t.storage().data())));
  return found == regions().end() ? nullptr : &*found;
}

bool is_made(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

// False where the tensor is to be filled at once.
bool wait(const at::Tensor& t, Recipe recipe) {
  Lock lock;
  auto* found = whole(t);
  if (!found) return false;
  recipe.casts = {t.scalar_type()};
  auto& region = found->second;
  region.recipe = std::move(recipe);
  region.waiting.assign((region.bytes + region.chunk_bytes() - 1) / region.chunk_bytes(), true);
  lay(found->first, region.bytes, PROT_NONE);
  return true;
}

// What it held is of no interest any more; zeros take its place. False where it is to be written over at once.
bool empty(const at::Tensor& t, bool if_waiting = false) {
  Lock lock;
  auto* found = whole(t);
  if (!found || (if_waiting && found->second.waiting.empty())) return false;
  found->second.waiting.clear();
  lay(found->first, found->second.bytes, PROT_READ | PROT_WRITE);
  return true;
}

uint64_t seed_of(const std::optional<at::Generator>& given) {
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(given, at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  return generator->random64();
}

bool is_worth(const at::Tensor& t) { return t.nbytes() >= LARGE && is_made(t.scalar_type()); }

at::Tensor& normal(at::Tensor& self, double mean, double deviation, std::optional<at::Generator> generator) {
  if (is_worth(self) && deviation >= 0 && wait(self, {Recipe::NORMAL, mean, deviation, 0, 0, seed_of(generator)})) return self;
  return at::native::normal_(self, mean, deviation, generator);
}

at::Tensor& uniform(at::Tensor& self, double from, double to, std::optional<at::Generator> generator) {
  if (is_worth(self) && from <= to && wait(self, {Recipe::UNIFORM, from, to, 0, 0, seed_of(generator)})) return self;
  return at::native::uniform_(self, from, to, generator);
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (is_worth(self) && !value.isComplex() && wait(self, {Recipe::CONSTANT, value.toDouble()})) return self;
  return at::native::fill_(self, value);
}

at::Tensor& zero(at::Tensor& self) { return empty(self) ? self : at::native::zero_(self); }

bool truncated(at::Tensor& self, double mean, double deviation, double low, double high) {
  return is_worth(self) && deviation > 0 && low < high && wait(self, {Recipe::TRUNCATED, mean, deviation, low, high, seed_of({})});
}

// A copy of what waits waits too, chunk by chunk: the others are copied.
bool copy_waiting(const at::Tensor& self, const at::Tensor& src) {
  if (!is_worth(self) || !is_worth(src) || self.strides() != src.strides() || self.sizes() != src.sizes()) return false;
  std::vector<bool> waiting;
  Recipe recipe;
  {
    Lock lock;
    auto *to = whole(self), *from = whole(src);
    if (!to || !from || to == from || from->second.waiting.empty() || from->second.recipe.casts.size() == CASTS) return false;
    waiting = from->second.waiting;
    recipe = from->second.recipe;
    recipe.casts.push_back(self.scalar_type());
    to->second.recipe = recipe;
    to->second.waiting = waiting;
    lay(to->first, to->second.bytes, PROT_NONE);
    for (size_t i = 0; i < waiting.size(); ++i)
      if (!waiting[i]) {
        const size_t at = i * to->second.chunk_bytes();
        lay(to->first + at, std::min(to->second.chunk_bytes(), to->second.bytes - at), PROT_READ | PROT_WRITE);
      }
  }
  const auto into = self.as_strided({self.numel()}, {1}), out = src.as_strided({src.numel()}, {1});
  for (size_t i = 0; i < waiting.size(); ++i) {
    const int64_t first = static_cast<int64_t>(i) * CHUNK;
    if (waiting[i]) continue;
    auto part = into.slice(0, first, first + CHUNK);
    at::native::copy_(part, out.slice(0, first, first + CHUNK));
  }
  return true;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (src.has_storage() && self.has_storage() && is_unknown(src)) mark_unknown(self);
  if (copy_waiting(self, src)) return self;
  if (self.nbytes() >= LARGE && self.sizes() == src.sizes() && !self.is_alias_of(src)) empty(self, true);
  return at::native::copy_(self, src, non_blocking);
}

struct Allocator final : c10::Allocator {
  static c10::Allocator* usual() { return c10::GetDefaultCPUAllocator(); }
  static void release(void* memory) {
    {
      Lock lock;
      auto found = regions().find(static_cast<char*>(memory));
      if (found != regions().end()) {
        munmap(found->first, found->second.bytes);
        regions().erase(found);
        return;
      }
    }
    usual()->raw_deleter()(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < LARGE) return usual()->allocate(bytes);
    const size_t mapped = (bytes + PAGE - 1) / PAGE * PAGE;
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return usual()->allocate(bytes);
    Lock lock;
    regions()[static_cast<char*>(memory)].bytes = mapped;
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

}  // namespace
}  // namespace wt

TORCH_LIBRARY(windtunnel, library) {
  library.def("truncated_normal_(Tensor(a!) self, float mean, float deviation, float low, float high) -> bool");
}

extern "C" {

// From now on, in this process. Once; after whoever else handles faults.
void wt_untouched() {
  static auto* allocator = new wt::Allocator();
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  static auto* own = new torch::Library(torch::Library::IMPL, "windtunnel", c10::DispatchKey::CPU, __FILE__, __LINE__);
  c10::SetCPUAllocator(allocator, 255);
  library->impl("normal_", &wt::normal);
  library->impl("uniform_", &wt::uniform);
  library->impl("fill_.Scalar", &wt::fill);
  library->impl("zero_", &wt::zero);
  library->impl("copy_", &wt::copy);
  own->impl("truncated_normal_", &wt::truncated);
  struct sigaction ours = {};
  ours.sa_sigaction = &wt::on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &wt::g_before);
}

// Make the numbers of all that waits between two addresses.
void wt_touch(char* begin, int64_t bytes) {
  for (char* at = begin; at < begin + bytes; at += wt::CHUNK) wt::touch(at);
}

}
