// Tensors and plain values in words: JSON for the table of operators, and bytes for the key of a call.
#include "describe.h"

#include <cmath>

namespace wt {

using c10::IValue;

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
    case c10::ScalarType::Float8_e4m3fnuz: return "float8_e4m3fnuz";
    case c10::ScalarType::Float8_e5m2: return "float8_e5m2";
    case c10::ScalarType::Float8_e5m2fnuz: return "float8_e5m2fnuz";
    case c10::ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    case c10::ScalarType::Float4_e2m1fn_x2: return "float4_e2m1fn_x2";
    case c10::ScalarType::UInt16: return "uint16";
    case c10::ScalarType::UInt32: return "uint32";
    case c10::ScalarType::UInt64: return "uint64";
    case c10::ScalarType::ComplexHalf: return "complex32";
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

void key_value(std::string& key, const IValue& v, bool place, bool floats) {
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

std::string tensor_text(const at::Tensor& t) {
  std::string s;
  json_tensor(s, dtype_name(t.scalar_type()), t.sizes(), t.strides(), t.is_cuda());
  return s;
}

}  // namespace wt
