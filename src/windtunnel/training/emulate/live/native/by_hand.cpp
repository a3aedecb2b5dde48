// The few operators that a shape function does not answer: copies between host and device, numbers that the host
// asks of the device, and tensors that change their storage.
#include "describe.h"
#include "known.h"
#include "record.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace wt {
namespace {

constexpr int64_t STAGED_BYTES = 64 << 10;  // pageable memory up to here is staged without waiting

// Host storages that hold zeros in the place of what the device has. The weak pointer keeps a storage's address from
// being used again, so that a later tensor is not taken for it.
std::unordered_map<void*, c10::weak_intrusive_ptr<c10::StorageImpl>>& unknown_storages() {
  static auto* all = new std::unordered_map<void*, c10::weak_intrusive_ptr<c10::StorageImpl>>();
  return *all;
}

}  // namespace

bool is_unknown(const at::Tensor& host) {
  std::lock_guard<std::recursive_mutex> lock(recorder().mutex);
  return unknown_storages().count(host.storage().unsafeGetStorageImpl()) != 0;
}

void mark_unknown(const at::Tensor& host) {
  auto* storage = host.storage().unsafeGetStorageImpl();
  std::lock_guard<std::recursive_mutex> lock(recorder().mutex);
  unknown_storages().try_emplace(storage, host.storage().getWeakStorageImpl());
}

namespace {

// Between host and device, and on the device. Host memory that a copy from the device would fill gets zeros.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  auto& r = recorder();
  note_forward_node();
  std::string s = "{\"n\":\"aten.copy_.default\",\"i\":[" + tensor_text(self) + "," + tensor_text(src) + "," +
                  (non_blocking ? "true" : "false") + "],\"o\":[" + tensor_text(self) + "],\"r\":" + std::to_string(r.region) + "}";
  {
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.add(OP, current_stream(), recorder().operator_row(s), note_flow({self, src}, {self}));
    // aten/src/ATen/native/cuda/Copy.cu: a blocking copy waits for its stream, in either direction. A copy that need not
    // block does so still where the host's memory is not pinned (CUDA's API synchronization behaviour), unless it
    // is small and goes to the device.
    if (self.is_cuda() != src.is_cuda()) {
      const auto& host = self.is_cuda() ? src : self;
      const bool small = self.is_cuda() && host.numel() * static_cast<int64_t>(host.element_size()) <= STAGED_BYTES;
      if (!non_blocking || !(small || is_pinned(host.const_data_ptr()))) r.add(SYNC, current_stream(), SYNC_STREAM);
    }
  }
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (self.is_cuda()) {
    if (src.is_cuda()) copy_values(self, src);
    else set_values(self, src.expand(self.sizes()));
  } else if (auto known = host_values(src); known.defined()) {
    self.copy_(known);
  } else {
    self.zero_();
    mark_unknown(self);
    r.read("copy to the host");
  }
  return self;
}

// A number that the host asks of the device has no value: a declared stand-in (1, or False) is given. A byte is a flag
// that a collective carries (booleans are not reduced): something is wrong, a limit is reached.
at::Scalar local_scalar(const at::Tensor& self) {
  auto& r = recorder();
  {
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.add(OP, current_stream(), recorder().operator_row("{\"n\":\"aten._local_scalar_dense.default\",\"i\":[" + tensor_text(self) + "],\"o\":[],\"r\":0}"), note_flow({self}, {}));
    r.add(SYNC, current_stream(), SYNC_STREAM);
  }
  if (auto known = host_values(self); known.defined()) {
    const auto number = known.item();
    r.read("", number.isComplex() ? 0 : number.toDouble());
    return number;
  }
  auto type = self.scalar_type();
  r.read(type == at::kByte ? "item of bytes" : "item");
  if (type == at::kBool) return at::Scalar(false);
  if (type == at::kByte) return at::Scalar(static_cast<int64_t>(0));
  if (c10::isIntegralType(type, false)) return at::Scalar(static_cast<int64_t>(1));
  return at::Scalar(1.0);
}

// Where it is not known whether two device tensors are the same, they are taken to be.
bool alike(const char* name, const at::Tensor& self, const at::Tensor& other) {
  auto& r = recorder();
  {
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.add(OP, current_stream(), recorder().operator_row("{\"n\":\"aten." + std::string(name) + ".default\",\"i\":[" + tensor_text(self) + "," +
                                          tensor_text(other) + "],\"o\":[],\"r\":0}"), note_flow({self, other}, {}));
    r.add(SYNC, current_stream(), SYNC_STREAM);
  }
  auto known = self.is_cuda() ? host_values(self) : self, as_known = other.is_cuda() ? host_values(other) : other;
  if (known.defined() && as_known.defined()) {
    const bool answer = std::string(name) == "equal" ? at::equal(known, as_known) : at::allclose(known, as_known);
    r.read("", answer);
    return answer;
  }
  r.read("equal");
  return true;
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  if (self.sizes() != other.sizes()) return false;
  return alike("equal", self, other);
}
bool allclose(const at::Tensor& self, const at::Tensor& other, double, double, bool) { return alike("allclose", self, other); }

void record_stream(at::Tensor& self, at::Stream stream) {
  auto* guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  guard->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, c10::SymIntArrayRef({c10::SymInt(count)}), c10::SymIntArrayRef({c10::SymInt(1)}));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, absent_allocator(), true);
  return set_storage(self, std::move(none), 0, c10::SymIntArrayRef({c10::SymInt(0)}), c10::SymIntArrayRef({c10::SymInt(1)}));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  int64_t need = static_cast<int64_t>(at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(), self.storage_offset()));
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (need > static_cast<int64_t>(storage->nbytes())) {
    storage->set_data_ptr_noswap(absent_allocator()->allocate(need));
    storage->set_nbytes(need);
  }
  return self;
}

}  // namespace

void register_by_hand(torch::Library& library) {
  library.impl("_fused_sdp_choice", &choose_attention);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("equal", &equal);
  library.impl("allclose", &allclose);
  library.impl("record_stream", &record_stream);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_source);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("resize_", &resize_);
}

}  // namespace wt

// Whether a host storage holds zeros in the place of what the device has.
extern "C" int wt_unknown(void* storage) {
  std::lock_guard<std::recursive_mutex> lock(wt::recorder().mutex);
  return wt::unknown_storages().count(storage) != 0;
}
