// The library's ops in torch, over the stable ABI: schemas, argument checks, and the call of the launcher. No mathematics.
//
// Every op writes into tensors it is given. In the row ops, a tensor of [rows, V] has its rows a multiple of 4 elements apart and 16-byte
// aligned, with room for V rounded up to 4 in each. fastgrpo/kernels/cuda.py calls them.
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/merge.h"
#include "cuda/rotary.h"
#include "cuda/row_args.h"
#include "cuda/scale.h"

// libtorch_cuda has it, which is there whenever a tensor is on a CUDA device; a CPU-only torch loads this library too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace fastgrpo {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "torch.float32";
    case ScalarType::Double: return "torch.float64";
    case ScalarType::Half: return "torch.float16";
    case ScalarType::BFloat16: return "torch.bfloat16";
    case ScalarType::Int: return "torch.int32";
    case ScalarType::Long: return "torch.int64";
    case ScalarType::Bool: return "torch.bool";
    default: return "of another dtype";
  }
}

std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ']';
  return text.str();
}

int64_t rounded_up(int64_t columns) { return (columns + 3) / 4 * 4; }

// Checks the arguments of one call against its logits.
struct Check {
  const char* op;
  const Tensor& logits;

  void matrix(const char* name, const Tensor& tensor) const {
    const int64_t rows = logits.size(0), columns = logits.size(1);
    if (tensor.dim() != 2 || tensor.size(0) != rows || tensor.size(1) != columns) {
      fail(op, ": ", name, " has shape ", shape_of(tensor), "; it must be [", rows, ", ", columns, "], as logits is.");
    }
    if (rows == 0) return;
    if (tensor.stride(1) != 1 && columns > 1) {
      fail(op, ": the entries of a row of ", name, " are ", tensor.stride(1), " elements apart; they must be neighbours.");
    }
    const int64_t pitch = tensor.stride(0);
    if (pitch % 4 != 0 || pitch < rounded_up(columns) || reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0) {
      fail(op, ": the rows of ", name, " are ", pitch, " elements apart; they must be a multiple of 4 apart, at least ",
           rounded_up(columns), ", and start at a multiple of 16 bytes. Allocate [rows, V rounded up to 64] and narrow it.");
    }
  }

  void of_logits(const char* name, const Tensor& tensor) const {
    if (!tensor.is_cuda()) fail(op, ": ", name, " is not on a CUDA device; move it to the device of logits.");
    if (tensor.get_device_index() != logits.get_device_index()) {
      fail(op, ": ", name, " is on cuda:", tensor.get_device_index(), " and logits on cuda:", logits.get_device_index(),
           "; move both to one device.");
    }
  }

  float* values(const char* name, const OptionalTensor& tensor) const {
    if (!tensor.has_value()) return nullptr;
    of_logits(name, *tensor);
    if (tensor->scalar_type() != ScalarType::Float) {
      fail(op, ": ", name, " is ", name_of(tensor->scalar_type()), "; it must be torch.float32.");
    }
    if (tensor->dim() != 1 || tensor->size(0) != logits.size(0) || !tensor->is_contiguous()) {
      fail(op, ": ", name, " has shape ", shape_of(*tensor), "; it must be contiguous [", logits.size(0),
           "], one value a row of logits.");
    }
    return static_cast<float*>(tensor->data_ptr());
  }
};

void require_success(const char* op, int status) {
  const auto error = static_cast<cudaError_t>(status);
  if (error != cudaSuccess) fail(op, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error), ".");
}

// The current stream of a device, which becomes the current one in this library's own CUDA runtime; a guard has set torch's.
void* stream_of(const char* op, int device) {
  require_success(op, cudaSetDevice(device));
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) {
    fail(op, ": torch gives no current stream for cuda:", device, ".");
  }
  return stream;
}

struct Range {
  const char *begin, *end;
};

Range range_of(const Tensor& tensor) {
  const char* begin = static_cast<const char*>(tensor.data_ptr());
  const int64_t last = (tensor.size(0) - 1) * tensor.stride(0) + tensor.size(1);
  return {begin, begin + last * static_cast<int64_t>(tensor.element_size())};
}

bool overlap(const Tensor& a, const Tensor& b) {
  const Range x = range_of(a), y = range_of(b);
  return x.begin < y.end && y.begin < x.end;
}

// One call: its arguments are collected here, and launch() runs the kernel that serves them.
struct Call {
  Check check;
  const Tensor& logits;
  RowArgs args{};
  bool in_place_second = false;

  Call(const char* op, const Tensor& logits_, const Tensor& targets, const OptionalTensor& bias, double temperature,
       double logit_scale, std::optional<double> softcap)
      : check{op, logits_}, logits(logits_) {
    if (!logits.is_cuda()) fail(op, ": logits is not on a CUDA device; this op has CUDA kernels only.");
    if (logits.scalar_type() != ScalarType::Float) {
      fail(op, ": logits is ", name_of(logits.scalar_type()), "; it must be torch.float32.");
    }
    if (logits.dim() != 2 || logits.size(1) == 0) {
      fail(op, ": logits has shape ", shape_of(logits), "; it must be [rows, V] with V >= 1.");
    }
    // Offsets within a row, and blocks in a grid, are 32-bit numbers.
    if (logits.size(0) >= (1 << 26) || logits.size(1) >= (1 << 29)) {
      fail(op, ": logits has shape ", shape_of(logits), "; give less than 2^26 rows and 2^29 columns a call.");
    }
    check.matrix("logits", logits);
    check.of_logits("targets", targets);
    const ScalarType type = targets.scalar_type();
    if (type != ScalarType::Int && type != ScalarType::Long) {
      fail(op, ": targets is ", name_of(type), "; it must be torch.int32 or torch.int64.");
    }
    if (targets.dim() != 1 || targets.size(0) != logits.size(0) || !targets.is_contiguous()) {
      fail(op, ": targets has shape ", shape_of(targets), "; it must be contiguous [", logits.size(0),
           "], one id a row of logits.");
    }
    if (!(temperature > 0)) fail(op, ": temperature is ", temperature, "; it must be above 0.");
    if (softcap.has_value() && !(*softcap > 0)) fail(op, ": softcap is ", *softcap, "; it must be above 0, or None.");
    args.logits = static_cast<float*>(logits.data_ptr());
    args.logits_pitch = logits.stride(0);
    args.targets = targets.data_ptr();
    args.targets_are_64_bit = type == ScalarType::Long;
    args.rows = static_cast<int>(logits.size(0));
    args.columns = static_cast<int>(logits.size(1));
    args.temperature = static_cast<float>(temperature);
    args.logit_scale = static_cast<float>(logit_scale);
    args.softcap = softcap.has_value() ? static_cast<float>(*softcap) : 0.f;
    args.grad_scale = 1.f;
    if (bias.has_value()) {
      check.of_logits("bias", *bias);
      if (bias->scalar_type() != ScalarType::Float || bias->dim() != 1 || bias->size(0) < rounded_up(args.columns) ||
          !bias->is_contiguous()) {
        fail(op, ": bias is ", name_of(bias->scalar_type()), " of shape ", shape_of(*bias),
             "; it must be contiguous torch.float32 with room for V rounded up to 4, at least [", rounded_up(args.columns),
             "].");
      }
      args.bias = static_cast<const float*>(bias->data_ptr());
    }
  }

  void statistics(const Tensor& logprobs, const Tensor& lse, const OptionalTensor& entropy) {
    args.logprobs = check.values("logprobs", logprobs);
    args.lse = check.values("lse", lse);
    args.entropy = check.values("entropy", entropy);
  }

  void gradients(const OptionalTensor& grad, const OptionalTensor& second, double scale) {
    if (!grad.has_value()) {
      if (second.has_value()) fail(check.op, ": entropy_grad is given without logprob_grad; give both.");
      return;
    }
    const ScalarType type = grad->scalar_type();
    if (type != ScalarType::BFloat16 && type != ScalarType::Half) {
      fail(check.op, ": the gradient is ", name_of(type), "; it must be torch.bfloat16 or torch.float16.");
    }
    args.grad_dtype = type == ScalarType::Half ? GradDtype::float16 : GradDtype::bfloat16;
    args.grad_scale = static_cast<float>(scale);
    place("the gradient", *grad, 0);
    args.grad = grad->data_ptr();
    args.grad_pitch = grad->stride(0);
    if (!second.has_value()) return;
    if (second->scalar_type() != type) fail(check.op, ": both gradients must have one dtype.");
    in_place_second = place("entropy_grad", *second, logits.stride(0));
    args.second_grad = second->data_ptr();
    args.second_pitch = second->stride(0);
  }

  // Over the logits at this offset (in elements of the gradient), or apart from them. Returns whether over.
  bool place(const char* name, const Tensor& grad, int64_t offset) const {
    check.of_logits(name, grad);
    check.matrix(name, grad);
    if (logits.size(0) == 0 || !overlap(grad, logits)) return false;
    const char* start = static_cast<const char*>(logits.data_ptr()) + 2 * offset;
    if (grad.data_ptr() != start || grad.stride(0) != 2 * logits.stride(0)) {
      fail(check.op, ": ", name, " overlaps logits; it must lie apart from them, or exactly over a half of their rows.");
    }
    return true;
  }

  void launch() {
    const int device = logits.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = stream_of(check.op, device);
    const bool once = args.grad != nullptr && args.coefficients != Coefficients::given;
    if (once && fastgrpo_row_cluster_serves(args.columns, device)) {
      return require_success(check.op, fastgrpo_row_cluster(&args, stream));
    }
    if (in_place_second) {
      fail(check.op, ": entropy_grad lies over logits, which this card must read twice; give it memory of its own.");
    }
    require_success(check.op, fastgrpo_row_streamed(&args, stream));
  }
};

void row_pass(const Tensor& logits, const Tensor& targets, const OptionalTensor& bias, double temperature,
              double logit_scale, std::optional<double> softcap, const Tensor& logprobs, const Tensor& lse,
              const OptionalTensor& entropy, const OptionalTensor& logprob_grad, const OptionalTensor& entropy_grad,
              double grad_scale) {
  Call call("row_pass", logits, targets, bias, temperature, logit_scale, softcap);
  call.statistics(logprobs, lse, entropy);
  call.gradients(logprob_grad, entropy_grad, grad_scale);
  call.launch();
}

void row_objective(const Tensor& logits, const Tensor& targets, const OptionalTensor& bias, double temperature,
                   double logit_scale, std::optional<double> softcap, const Tensor& logprobs, const Tensor& lse,
                   const OptionalTensor& entropy, const Tensor& advantages, const Tensor& token_weights,
                   const OptionalTensor& old_logprobs, const OptionalTensor& ref_logprobs,
                   const OptionalTensor& multiplier, const OptionalTensor& phi, const OptionalTensor& entropy_weights,
                   int64_t loss_type, double epsilon_low, double epsilon_high, double delta, double beta,
                   bool bias_correct_kl, double sapo_temperature_pos, double sapo_temperature_neg, const Tensor& grad,
                   double grad_scale) {
  Call call("row_objective", logits, targets, bias, temperature, logit_scale, softcap);
  call.statistics(logprobs, lse, entropy);
  call.gradients(grad, std::nullopt, grad_scale);
  if (loss_type < 0 || loss_type > static_cast<int64_t>(LossType::vespo)) {
    fail("row_objective: loss_type is ", loss_type, "; it must be a place in fastgrpo.objective.LOSS_TYPES.");
  }
  if (beta != 0 && !ref_logprobs.has_value()) fail("row_objective: beta is ", beta, ", so ref_logprobs must be given.");
  RowArgs& args = call.args;
  args.coefficients = Coefficients::objective;
  args.params = {static_cast<LossType>(loss_type), epsilon_low, epsilon_high, delta, beta, bias_correct_kl,
                 sapo_temperature_pos, sapo_temperature_neg};
  args.advantages = call.check.values("advantages", advantages);
  args.token_weights = call.check.values("token_weights", token_weights);
  args.old_logprobs = call.check.values("old_logprobs", old_logprobs);
  args.ref_logprobs = call.check.values("ref_logprobs", ref_logprobs);
  args.multiplier = call.check.values("multiplier", multiplier);
  args.phi = call.check.values("phi", phi);
  args.entropy_weights = call.check.values("entropy_weights", entropy_weights);
  call.launch();
}

void row_grad(const Tensor& logits, const Tensor& targets, const OptionalTensor& bias, double temperature,
              double logit_scale, std::optional<double> softcap, const Tensor& logprobs, const Tensor& lse,
              const OptionalTensor& entropy, const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy,
              const Tensor& grad, double grad_scale) {
  Call call("row_grad", logits, targets, bias, temperature, logit_scale, softcap);
  call.statistics(logprobs, lse, entropy);
  call.gradients(grad, std::nullopt, grad_scale);
  call.args.coefficients = Coefficients::given;
  call.args.grad_logprobs = call.check.values("grad_logprobs", grad_logprobs);
  call.args.grad_entropy = call.check.values("grad_entropy", grad_entropy);
  if (grad_entropy.has_value() && !entropy.has_value()) fail("row_grad: grad_entropy is given, so entropy must be.");
  call.launch();
}

GradDtype grad_dtype_of(const char* op, const Tensor& out) {
  const ScalarType type = out.scalar_type();
  if (type != ScalarType::BFloat16 && type != ScalarType::Half) {
    fail(op, ": out is ", name_of(type), "; it must be torch.bfloat16 or torch.float16.");
  }
  return type == ScalarType::Half ? GradDtype::float16 : GradDtype::bfloat16;
}

// Contiguous, on the device of `out`, of a dtype and a number of elements.
void* flat(const char* op, const Tensor& out, const char* name, const Tensor& tensor, ScalarType type, int64_t count) {
  if (!tensor.is_cuda() || tensor.get_device_index() != out.get_device_index()) {
    fail(op, ": ", name, " is not on the device of out; move it there.");
  }
  if (tensor.scalar_type() != type || tensor.numel() != count || !tensor.is_contiguous()) {
    fail(op, ": ", name, " is ", name_of(tensor.scalar_type()), " of shape ", shape_of(tensor), "; it must be contiguous ",
         name_of(type), " with ", count, " elements.");
  }
  return tensor.data_ptr();
}

void scale_round(const Tensor& values, const Tensor& factor, const Tensor& out) {
  const char* op = "scale_round";
  if (!out.is_cuda()) fail(op, ": out is not on a CUDA device; this op has CUDA kernels only.");
  const GradDtype dtype = grad_dtype_of(op, out);
  const int device = out.get_device_index();
  const auto* from = static_cast<const float*>(flat(op, out, "values", values, ScalarType::Float, out.numel()));
  const auto* by = static_cast<const float*>(flat(op, out, "factor", factor, ScalarType::Float, 1));
  void* into = flat(op, out, "out", out, out.scalar_type(), out.numel());
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(into)) % 16 != 0) {
    fail(op, ": values and out must start at a multiple of 16 bytes.");
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = stream_of(op, device);
  require_success(op, fastgrpo_scale_round(from, by, into, dtype, out.numel(), stream));
}

void weigh_slopes(const OptionalTensor& grad_logprobs, const Tensor& logprob_slope, const OptionalTensor& grad_entropy,
                  const OptionalTensor& entropy_slope, const Tensor& targets, int64_t vocabulary, const Tensor& out) {
  const char* op = "weigh_slopes";
  if (!out.is_cuda()) fail(op, ": out is not on a CUDA device; this op has CUDA kernels only.");
  if (out.dim() != 2) fail(op, ": out has shape ", shape_of(out), "; it must be [rows, width].");
  const GradDtype dtype = grad_dtype_of(op, out);
  const int device = out.get_device_index();
  const int64_t rows = out.size(0), width = out.size(1);
  if (rows >= (int64_t{1} << 31) || width >= (int64_t{1} << 31)) fail(op, ": out has shape ", shape_of(out), ", which is too large.");
  const auto values = [&](const char* name, const OptionalTensor& tensor, int64_t count) {
    return tensor.has_value() ? static_cast<const float*>(flat(op, out, name, *tensor, ScalarType::Float, count)) : nullptr;
  };
  const float* g = values("grad_logprobs", grad_logprobs, rows);
  const float* u = values("logprob_slope", logprob_slope, rows * width);
  const float* h = values("grad_entropy", grad_entropy, rows);
  const float* v = values("entropy_slope", entropy_slope, rows * width);
  if (h != nullptr && v == nullptr) fail(op, ": grad_entropy is given, so entropy_slope must be.");
  const auto* ids = static_cast<const int64_t*>(flat(op, out, "targets", targets, ScalarType::Long, rows));
  void* into = flat(op, out, "out", out, out.scalar_type(), out.numel());
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = stream_of(op, device);
  require_success(op, fastgrpo_weigh_slopes(g, u, h, v, ids, vocabulary, into, dtype, static_cast<int>(rows),
                                            static_cast<int>(width), stream));
}

void merge_attention(const Tensor& out, const Tensor& lse, const Tensor& more, const Tensor& more_lse,
                     const Tensor& continued, const Tensor& merged_lse) {
  const char* op = "merge_attention";
  if (!out.is_cuda()) fail(op, ": out is not on a CUDA device; this op has CUDA kernels only.");
  if (out.dim() != 3 || out.size(2) % 8 != 0) {
    fail(op, ": out has shape ", shape_of(out), "; it must be [tokens, heads, width] with a width that 8 divides.");
  }
  const GradDtype dtype = grad_dtype_of(op, out);
  const int device = out.get_device_index();
  const int64_t tokens = out.size(0), heads = out.size(1), width = out.size(2);
  if (out.numel() / 8 >= (int64_t{1} << 31)) fail(op, ": out has shape ", shape_of(out), ", which is too large.");
  void* into = flat(op, out, "out", out, out.scalar_type(), out.numel());
  const void* from = flat(op, out, "more", more, out.scalar_type(), out.numel());
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(into)) % 16 != 0) {
    fail(op, ": out and more must start at a multiple of 16 bytes.");
  }
  const auto values = [&](const char* name, const Tensor& tensor) {
    return static_cast<float*>(flat(op, out, name, tensor, ScalarType::Float, tokens * heads));
  };
  const auto* marks = static_cast<const bool*>(flat(op, out, "continued", continued, ScalarType::Bool, tokens));
  const float *first = values("lse", lse), *second = values("more_lse", more_lse);
  float* total = values("merged_lse", merged_lse);
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = stream_of(op, device);
  require_success(op, fastgrpo_merge_attention(into, first, from, second, marks, total, dtype, static_cast<int>(tokens),
                                               static_cast<int>(heads), static_cast<int>(width), stream));
}

void rotary(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin, const Tensor& out_query,
            const Tensor& out_key, bool transposed) {
  const char* op = "rotary";
  const Tensor& out = out_query;
  if (!out.is_cuda()) fail(op, ": out_query is not on a CUDA device; this op has CUDA kernels only.");
  if (out.dim() != 3 || out.size(2) % 16 != 0) {
    fail(op, ": out_query has shape ", shape_of(out), "; it must be [tokens, heads, width] with a width that 16 divides.");
  }
  const int64_t tokens = out.size(0), heads = out.size(1), width = out.size(2);
  if (key.dim() != 3 || key.size(0) != tokens || key.size(2) != width) {
    fail(op, ": key has shape ", shape_of(key), " and out_query ", shape_of(out), "; only their heads may differ.");
  }
  if ((out.numel() + key.numel()) / 16 >= (int64_t{1} << 31)) fail(op, ": out_query has shape ", shape_of(out), ", which is too large.");
  const GradDtype dtype = grad_dtype_of(op, out);
  const int device = out.get_device_index();
  const auto values = [&](const char* name, const Tensor& tensor, int64_t count) {
    void* at = flat(op, out, name, tensor, out.scalar_type(), count);
    if (reinterpret_cast<uintptr_t>(at) % 16 != 0) fail(op, ": ", name, " must start at a multiple of 16 bytes.");
    return at;
  };
  const void *q = values("query", query, out.numel()), *k = values("key", key, key.numel());
  const void *c = values("cos", cos, tokens * width), *s = values("sin", sin, tokens * width);
  void *into_q = values("out_query", out, out.numel()), *into_k = values("out_key", out_key, key.numel());
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = stream_of(op, device);
  require_success(op, fastgrpo_rotary(q, k, c, s, into_q, into_k, dtype, static_cast<int>(tokens), static_cast<int>(heads),
                                      static_cast<int>(key.size(1)), static_cast<int>(width), transposed, stream));
}

}  // namespace
}  // namespace fastgrpo

STABLE_TORCH_LIBRARY_FRAGMENT(fastgrpo, m) {
  m.def(
      "row_pass(Tensor(a!) logits, Tensor targets, Tensor? bias, float temperature, float logit_scale, float? softcap, "
      "Tensor(b!) logprobs, Tensor(c!) lse, Tensor(d!)? entropy, Tensor(e!)? logprob_grad, Tensor(f!)? entropy_grad, "
      "float grad_scale) -> ()");
  m.def(
      "row_objective(Tensor(a!) logits, Tensor targets, Tensor? bias, float temperature, float logit_scale, "
      "float? softcap, Tensor(b!) logprobs, Tensor(c!) lse, Tensor(d!)? entropy, Tensor advantages, Tensor token_weights, "
      "Tensor? old_logprobs, Tensor? ref_logprobs, Tensor? multiplier, Tensor? phi, Tensor? entropy_weights, "
      "int loss_type, float epsilon_low, float epsilon_high, float delta, float beta, bool bias_correct_kl, "
      "float sapo_temperature_pos, float sapo_temperature_neg, Tensor(e!) grad, float grad_scale) -> ()");
  m.def(
      "row_grad(Tensor(a!) logits, Tensor targets, Tensor? bias, float temperature, float logit_scale, float? softcap, "
      "Tensor logprobs, Tensor lse, Tensor? entropy, Tensor? grad_logprobs, Tensor? grad_entropy, Tensor(b!) grad, "
      "float grad_scale) -> ()");
  m.def("scale_round(Tensor values, Tensor factor, Tensor(a!) out) -> ()");
  m.def(
      "weigh_slopes(Tensor? grad_logprobs, Tensor logprob_slope, Tensor? grad_entropy, Tensor? entropy_slope, "
      "Tensor targets, int vocabulary, Tensor(a!) out) -> ()");
  m.def(
      "merge_attention(Tensor(a!) out, Tensor lse, Tensor more, Tensor more_lse, Tensor continued, "
      "Tensor(b!) merged_lse) -> ()");
  m.def(
      "rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, Tensor(a!) out_query, Tensor(b!) out_key, "
      "bool transposed) -> ()");
}

// For every device, so that a tensor on the wrong one meets the checks above.
STABLE_TORCH_LIBRARY_IMPL(fastgrpo, CompositeExplicitAutograd, m) {
  m.impl("row_pass", TORCH_BOX(&fastgrpo::row_pass));
  m.impl("row_objective", TORCH_BOX(&fastgrpo::row_objective));
  m.impl("row_grad", TORCH_BOX(&fastgrpo::row_grad));
  m.impl("scale_round", TORCH_BOX(&fastgrpo::scale_round));
  m.impl("weigh_slopes", TORCH_BOX(&fastgrpo::weigh_slopes));
  m.impl("merge_attention", TORCH_BOX(&fastgrpo::merge_attention));
  m.impl("rotary", TORCH_BOX(&fastgrpo::rotary));
}
