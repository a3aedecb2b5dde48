// Every operator that a CUDA build has a CUDA kernel for, answered by its shape function.
//
// One boxed kernel stands in for them all. A call's key is the operator with the shapes, strides, dtypes and plain
// values of its arguments. The first call of a key asks PyTorch's own Meta kernel what comes out; later calls
// take the answer from a table, which is why a capture costs microseconds an operator. Outputs get fresh storage
// from the absent allocator; outputs that the schema says alias an input get that input's storage.
#include "record.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace wt {
c10::Allocator* absent_allocator();
void note_forward_node();

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

struct Out {
  int alias = -1;  // index of the argument that this output is (in-place) or views
  bool view = false;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool defined = true;
};

struct Return {
  enum What { TENSOR, LIST, PLAIN } what = TENSOR;
  std::vector<Out> outs;
  IValue plain;
};

struct Resize {
  int arg;
  std::vector<int64_t> sizes, strides;
};

struct Entry {
  int32_t row = -1;
  std::vector<Return> returns;
  std::vector<Resize> resizes;
};

const char* dtype_name(c10::ScalarType t) {
  switch (t) {
    case c10::ScalarType::Float: return "float32";
    case c10::ScalarType::Double: return "float64";
    case c10::ScalarType::Half: return "float16";
    case c10::ScalarType::BFloat16: return "bfloat16";
    case c10::ScalarType::Long: return "int64";
    case c10::ScalarType::Int: return "int32";
    case c10::ScalarType::Short: return "int16";
    case c10::ScalarType::Char: return "int8";
    case c10::ScalarType::Byte: return "uint8";
    case c10::ScalarType::Bool: return "bool";
    case c10::ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case c10::ScalarType::Float8_e5m2: return "float8_e5m2";
    case c10::ScalarType::ComplexFloat: return "complex64";
    case c10::ScalarType::ComplexDouble: return "complex128";
    default: return c10::toString(t);
  }
}

void json_ints(std::string& s, c10::IntArrayRef v) {
  s += '[';
  for (size_t i = 0; i < v.size(); ++i) {
    if (i) s += ',';
    s += std::to_string(v[i]);
  }
  s += ']';
}

void json_tensor(std::string& s, const char* dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, bool cuda) {
  s += "{\"t\":\"";
  s += dtype;
  s += "\",\"s\":";
  json_ints(s, sizes);
  s += ",\"d\":";
  json_ints(s, strides);
  if (!cuda) s += ",\"c\":1";
  s += '}';
}

void json_string(std::string& s, const std::string& text) {
  s += '"';
  for (char c : text) {
    if (c == '"' || c == '\\') s += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) s += c;
  }
  s += '"';
}

void json_value(std::string& s, const IValue& v) {
  if (v.isTensor()) {
    const auto& t = v.toTensor();
    if (!t.defined()) s += "null";
    else json_tensor(s, dtype_name(t.scalar_type()), t.sizes(), t.strides(), t.is_cuda());
  } else if (v.isNone()) {
    s += "null";
  } else if (v.isInt()) {
    s += std::to_string(v.toInt());
  } else if (v.isDouble()) {
    double d = v.toDouble();
    char b[40];
    if (std::isfinite(d)) snprintf(b, sizeof b, "%.17g", d);
    else snprintf(b, sizeof b, "\"%s\"", std::isnan(d) ? "nan" : d > 0 ? "inf" : "-inf");
    s += b;
  } else if (v.isBool()) {
    s += v.toBool() ? "true" : "false";
  } else if (v.isString()) {
    json_string(s, v.toStringRef());
  } else if (v.isTensorList() || v.isOptionalTensorList() || v.isList() || v.isIntList() || v.isDoubleList() || v.isBoolList()) {
    s += '[';
    bool first = true;
    for (const auto& e : v.toListRef()) {
      if (!first) s += ',';
      first = false;
      json_value(s, e);
    }
    s += ']';
  } else {
    s += "null";
  }
}

template <typename T>
void put(std::string& key, T value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); }

void key_tensor(std::string& key, const at::Tensor& t, bool place) {
  if (!t.defined()) { key += 'U'; return; }
  key += t.is_cuda() ? 'T' : (t.dim() == 0 ? 'c' : 'C');
  key += static_cast<char>(t.scalar_type());
  key += static_cast<char>(t.dim());
  for (auto n : t.sizes()) put(key, n);
  for (auto n : t.strides()) put(key, n);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) key += 'w';
  if (place) {
    put(key, t.storage_offset());
    put(key, static_cast<int64_t>(t.storage().nbytes()));
  }
}

// `floats`: whether floating-point values count. They can decide a shape, but not what an operator costs.
void key_value(std::string& key, const IValue& v, bool place, bool floats = true) {
  if (v.isTensor()) key_tensor(key, v.toTensor(), place);
  else if (v.isNone()) key += 'N';
  else if (v.isInt()) { key += 'I'; put(key, v.toInt()); }
  else if (v.isDouble()) { key += 'F'; if (floats) put(key, v.toDouble()); }
  else if (v.isBool()) key += v.toBool() ? 'b' : 'B';
  else if (v.isTensorList()) {
    key += '[';
    auto list = v.toTensorVector();
    put(key, list.size());
    for (const auto& t : list) key_tensor(key, t, place);
  } else if (v.isList()) {
    key += '(';
    auto list = v.toListRef();
    put(key, list.size());
    for (const auto& e : list) key_value(key, e, place, floats);
  } else if (v.isString()) { key += 'S'; key += v.toStringRef(); key += '\0'; }
  else if (v.isDevice()) { key += 'D'; key += static_cast<char>(v.toDevice().type()); }
  else if (v.isComplexDouble()) { key += 'X'; put(key, v.toComplexDouble()); }
  else key += '?';
}

struct MetaMaker {
  // Storages that are shared among arguments stay shared among their shape-only copies.
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages;

  at::Tensor operator()(const at::Tensor& t) {
    if (!t.defined() || t.is_meta()) return t;
    if (!t.is_cuda() && t.dim() == 0) return t;
    auto* impl = t.storage().unsafeGetStorageImpl();
    auto found = storages.find(impl);
    if (found == storages.end()) {
      c10::Storage fresh(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                         c10::GetAllocator(c10::DeviceType::Meta), true);
      found = storages.emplace(impl, fresh).first;
    }
    auto m = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second),
                                                      c10::DispatchKeySet(c10::DispatchKey::Meta), t.dtype());
    m.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj()) m._set_conj(true);
    if (t.is_neg()) m._set_neg(true);
    return m;
  }

  IValue value(const IValue& v) {
    if (v.isTensor()) return IValue((*this)(v.toTensor()));
    if (v.isTensorList()) {
      c10::List<at::Tensor> out;
      for (const auto& t : v.toTensorVector()) out.push_back((*this)(t));
      return out;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> out;
      for (const auto& t : v.toOptionalTensorVector())
        out.push_back(t && t->defined() ? std::optional<at::Tensor>((*this)(*t)) : std::nullopt);
      return out;
    }
    if (v.isDevice()) return IValue(c10::Device(c10::DeviceType::Meta));
    return v;
  }
};

struct Kernel final : c10::OperatorKernel {
  std::unordered_map<std::string, Entry> table;
  std::unordered_map<std::string, int32_t> rows;
  bool ready = false, any_alias = false, views = false, in_place_only = true, has_meta = true;
  std::string name;
  std::vector<int> written;                  // arguments that the schema says are written
  std::vector<std::pair<int, bool>> aliases; // for each return: argument that it aliases (-1: none), and whether it is a view
  std::vector<std::pair<bool, bool>> inputs_alias;

  void prepare(const c10::OperatorHandle& op) {
    const auto& schema = op.schema();
    name = schema.name();
    auto colons = name.find("::");
    if (colons != std::string::npos) name.replace(colons, 2, ".");
    name += '.';
    name += schema.overload_name().empty() ? "default" : schema.overload_name();
    const auto& args = schema.arguments();
    for (size_t i = 0; i < args.size(); ++i)
      if (args[i].alias_info() && args[i].alias_info()->isWrite()) written.push_back(static_cast<int>(i));
    for (const auto& ret : schema.returns()) {
      int from = -1;
      bool view = false;
      if (ret.alias_info()) {
        for (size_t i = 0; i < args.size(); ++i) {
          if (!args[i].alias_info()) continue;
          const auto& a = args[i].alias_info()->beforeSets();
          const auto& b = ret.alias_info()->beforeSets();
          bool meets = false;
          for (const auto& s : b) meets |= a.count(s) > 0;
          if (meets) {
            from = static_cast<int>(i);
            view = !args[i].alias_info()->isWrite();
          }
        }
      }
      aliases.emplace_back(from, view);
      views |= view;
      if (from < 0 || view) in_place_only = false;
    }
    if (schema.returns().empty() && written.empty()) in_place_only = false;
    has_meta = op.hasKernelForDispatchKey(c10::DispatchKey::Meta) || op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
               op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
               op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    ready = true;
  }

  Entry ask(const c10::OperatorHandle& op, const Stack& args) {
    Entry entry;
    const auto& schema = op.schema();
    MetaMaker meta;
    Stack stack;
    for (const auto& v : args) stack.push_back(meta.value(v));
    Stack kept = stack;
    bool asked = false;
    if (has_meta) {
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      c10::impl::ExcludeDispatchKeyGuard no_python(
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
      op.callBoxed(&stack);
      asked = true;
    } else if (!in_place_only) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "windtunnel: ", name, " has no shape function, so its result on a device that is not there "
                  "is unknown (its size depends on the data, or the operator is a custom kernel without a fake implementation)");
    }
    if (asked) {
      for (int i : written) {
        if (!kept[i].isTensor() || !kept[i].toTensor().defined()) continue;
        const auto& now = kept[i].toTensor();
        const auto& was = args[i].toTensor();
        if (now.sizes() != was.sizes() || now.strides() != was.strides())
          entry.resizes.push_back({i, now.sizes().vec(), now.strides().vec()});
      }
    }
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      Return ret;
      auto [from, view] = aliases[i];
      if (from >= 0 && !view) {
        ret.what = args[from].isTensor() ? Return::TENSOR : Return::LIST;
        Out out;
        out.alias = from;
        ret.outs.push_back(out);
      } else {
        const auto& v = stack[i];
        auto describe = [&](const at::Tensor& t) {
          Out out;
          out.defined = t.defined();
          if (!t.defined()) return out;
          out.sizes = t.sizes().vec();
          out.strides = t.strides().vec();
          out.offset = t.storage_offset();
          out.dtype = t.scalar_type();
          if (view) { out.alias = from; out.view = true; }
          return out;
        };
        if (v.isTensor()) ret.outs.push_back(describe(v.toTensor()));
        else if (v.isTensorList()) {
          ret.what = Return::LIST;
          for (const auto& t : v.toTensorVector()) ret.outs.push_back(describe(t));
        } else {
          ret.what = Return::PLAIN;
          ret.plain = v;
        }
      }
      entry.returns.push_back(std::move(ret));
    }
    return entry;
  }

  int32_t row(const Entry& entry, const Stack& args) {
    auto& r = recorder();
    // Views cost nothing on the device, and differ in every offset: one row for each view operator.
    std::string row_key;
    if (!views) {
      for (const auto& v : args) key_value(row_key, v, false, false);
      put(row_key, r.region);
    }
    auto found = rows.find(row_key);
    if (found != rows.end()) return found->second;
    std::string s = "{\"n\":";
    json_string(s, name);
    s += ",\"i\":[";
    if (!views) {
      for (size_t i = 0; i < args.size(); ++i) {
        if (i) s += ',';
        json_value(s, args[i]);
      }
    }
    s += "],\"o\":[";
    bool first = true;
    if (!views) {
      for (const auto& ret : entry.returns) {
        for (const auto& out : ret.outs) {
          if (!out.defined || ret.what == Return::PLAIN) continue;
          auto emit = [&](const at::Tensor& t) {
            if (!first) s += ',';
            first = false;
            json_tensor(s, dtype_name(t.scalar_type()), t.sizes(), t.strides(), true);
          };
          if (out.alias >= 0) {
            if (args[out.alias].isTensor()) emit(args[out.alias].toTensor());
            else if (args[out.alias].isTensorList())
              for (const auto& t : args[out.alias].toTensorVector()) emit(t);
          } else {
            if (!first) s += ',';
            first = false;
            json_tensor(s, dtype_name(out.dtype), out.sizes, out.strides, true);
          }
        }
      }
      if (entry.returns.empty()) {  // foreach and fused operators return nothing and write their lists
        for (int i : written) {
          std::vector<at::Tensor> list;
          if (args[i].isTensorList()) list = args[i].toTensorVector();
          else if (args[i].isTensor()) list = {args[i].toTensor()};
          for (const auto& t : list) {
            if (!first) s += ',';
            first = false;
            json_tensor(s, dtype_name(t.scalar_type()), t.sizes(), t.strides(), true);
          }
        }
      }
    }
    s += "],\"r\":" + std::to_string(r.region) + "}";
    int32_t number = static_cast<int32_t>(r.operators.size());
    r.operators.push_back(std::move(s));
    rows.emplace(std::move(row_key), number);
    return number;
  }

  at::Tensor make(const Out& out, const Stack& args) {
    if (!out.defined) return {};
    if (out.view) {
      const auto& base = args[out.alias].toTensor();
      auto t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                        c10::scalarTypeToTypeMeta(out.dtype));
      t.unsafeGetTensorImpl()->set_sizes_and_strides(out.sizes, out.strides, out.offset);
      return t;
    }
    return at::detail::empty_strided_generic(out.sizes, out.strides, absent_allocator(),
                                             c10::DispatchKeySet(c10::DispatchKey::CUDA), out.dtype);
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    if (!ready) prepare(op);
    auto& r = recorder();
    const size_t count = op.schema().arguments().size();
    Stack args(std::make_move_iterator(stack->end() - count), std::make_move_iterator(stack->end()));
    stack->resize(stack->size() - count);
    note_forward_node();

    std::string key;
    key.reserve(128);
    for (const auto& v : args) key_value(key, v, views);
    put(key, r.region);
    auto found = table.find(key);
    if (found == table.end()) {
      Entry fresh;
      {
        // The shape function may be Python and dispatch operators of its own: none of them is the script's.
        recorder().paused++;
        try {
          fresh = ask(op, args);
        } catch (...) {
          recorder().paused--;
          throw;
        }
        recorder().paused--;
      }
      fresh.row = row(fresh, args);
      found = table.emplace(std::move(key), std::move(fresh)).first;
    }
    const Entry& entry = found->second;
    for (int i : written) {
      if (args[i].isTensor()) drop_shadow(args[i].toTensor());
      else if (args[i].isTensorList())
        for (const auto& t : args[i].toTensorVector()) drop_shadow(t);
    }

    for (const auto& change : entry.resizes) {
      const auto& t = args[change.arg].toTensor();
      auto* impl = t.unsafeGetTensorImpl();
      impl->set_sizes_and_strides(change.sizes, change.strides);
      int64_t need = static_cast<int64_t>(
          at::detail::computeStorageNbytes(change.sizes, change.strides, t.dtype().itemsize(), t.storage_offset()));
      auto* storage = t.storage().unsafeGetStorageImpl();
      if (need > static_cast<int64_t>(storage->nbytes())) {
        storage->set_data_ptr_noswap(absent_allocator()->allocate(need));
        storage->set_nbytes(need);
      }
    }
    std::vector<IValue> results;
    for (const auto& ret : entry.returns) {
      if (ret.what == Return::PLAIN) results.push_back(ret.plain);
      else if (ret.outs.size() == 1 && ret.outs[0].alias >= 0 && !ret.outs[0].view) results.push_back(args[ret.outs[0].alias]);
      else if (ret.what == Return::TENSOR) results.emplace_back(make(ret.outs[0], args));
      else {
        c10::List<at::Tensor> list;
        for (const auto& out : ret.outs) list.push_back(make(out, args));
        results.emplace_back(std::move(list));
      }
    }
    {
      std::lock_guard<std::recursive_mutex> lock(r.mutex);
      r.add(OP, current_stream(), entry.row);
    }
    for (auto& v : results) stack->push_back(std::move(v));
  }
};

int32_t plain_row(const std::string& text) {
  static std::unordered_map<std::string, int32_t> rows;
  auto& r = recorder();
  auto found = rows.find(text);
  if (found != rows.end()) return found->second;
  int32_t number = static_cast<int32_t>(r.operators.size());
  r.operators.push_back(text);
  rows.emplace(text, number);
  return number;
}

std::string tensor_text(const at::Tensor& t) {
  std::string s;
  json_tensor(s, dtype_name(t.scalar_type()), t.sizes(), t.strides(), t.is_cuda());
  return s;
}

// Between host and device, and on the device. Host memory that a copy from the device would fill gets zeros.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  auto& r = recorder();
  note_forward_node();
  std::string s = "{\"n\":\"aten.copy_.default\",\"i\":[" + tensor_text(self) + "," + tensor_text(src) + "," +
                  (non_blocking ? "true" : "false") + "],\"o\":[" + tensor_text(self) + "],\"r\":" + std::to_string(r.region) + "}";
  {
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.add(OP, current_stream(), plain_row(s));
    // A copy from pageable memory returns once it is staged, one to the host when it has arrived.
    if (!self.is_cuda() && !non_blocking) r.add(SYNC, current_stream(), SYNC_STREAM);
  }
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (self.is_cuda()) {
    if (!src.is_cuda() && src.numel() * static_cast<int64_t>(src.element_size()) <= SHADOW_BYTES)
      set_shadow(self, src.expand(self.sizes()).to(self.scalar_type()));
    else if (auto* known = src.is_cuda() && src.sizes() == self.sizes() ? shadow_of(src) : nullptr)
      set_shadow(self, known->as_strided(src.sizes(), src.strides(), src.storage_offset()).to(self.scalar_type()));
    else
      drop_shadow(self);
  } else if (auto* known = shadow_of(src)) {
    self.copy_(known->as_strided(src.sizes(), src.strides(), src.storage_offset()));
  } else {
    self.zero_();
    if (r.on && !r.paused && r.host_read) r.host_read("copy to the host");
  }
  return self;
}

// A number that the host asks of the device has no value: a declared stand-in (1, or False) is given.
at::Scalar local_scalar(const at::Tensor& self) {
  auto& r = recorder();
  {
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.add(OP, current_stream(), plain_row("{\"n\":\"aten._local_scalar_dense.default\",\"i\":[" + tensor_text(self) + "],\"o\":[],\"r\":0}"));
    r.add(SYNC, current_stream(), SYNC_STREAM);
  }
  if (auto* known = shadow_of(self)) return known->as_strided({}, {}, self.storage_offset()).item();
  if (r.on && !r.paused && r.host_read) r.host_read("item");
  auto type = self.scalar_type();
  if (type == at::kBool) return at::Scalar(false);
  if (c10::isIntegralType(type, false)) return at::Scalar(static_cast<int64_t>(1));
  return at::Scalar(1.0);
}

bool equal(const at::Tensor&, const at::Tensor&) {
  auto& r = recorder();
  if (r.on && !r.paused && r.host_read) r.host_read("equal");
  return true;
}

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
}  // namespace wt

// `names`: operators ("aten::mm", "aten::add.out"…), one a line. Returns how many were found and registered.
extern "C" int wt_register_operators(const char* names) {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  const std::vector<std::string> by_hand = {"copy_", "_local_scalar_dense", "equal", "record_stream", "set_.source_Storage_storage_offset", "resize_"};
  int count = 0;
  std::string text(names), line;
  size_t at = 0;
  while (at < text.size()) {
    size_t end = text.find('\n', at);
    if (end == std::string::npos) end = text.size();
    line = text.substr(at, end - at);
    at = end + 1;
    if (line.empty()) continue;
    auto dot = line.find('.');
    c10::OperatorName name("aten::" + (dot == std::string::npos ? line : line.substr(0, dot)),
                           dot == std::string::npos ? "" : line.substr(dot + 1));
    if (std::find(by_hand.begin(), by_hand.end(), line) != by_hand.end()) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    library.impl(line.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<wt::Kernel>()));
    ++count;
  }
  library.impl("copy_", &wt::copy_);
  library.impl("_local_scalar_dense", &wt::local_scalar);
  library.impl("equal", &wt::equal);
  library.impl("record_stream", &wt::record_stream);
  library.impl("set_.source_Storage_storage_offset", &wt::set_storage);
  library.impl("resize_", &wt::resize_);
  return count;
}
