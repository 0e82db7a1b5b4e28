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
#include "cuda/compact.h"
#include "cuda/fused_head.h"
#include "cuda/grpo.h"
#include "cuda/pack.h"
#include "cuda/row_args.h"
#include "cuda/scale.h"
#include "cuda/swiglu.h"
#include "cuda/target_terms.h"

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

// Checks the arguments of one call against the tensor that has its rows.
struct Check {
  const char* op;
  const char* like;  // its name
  int64_t rows, columns;
  int device;

  void matrix(const char* name, const Tensor& tensor) const {
    if (tensor.dim() != 2 || tensor.size(0) != rows || tensor.size(1) != columns) {
      fail(op, ": ", name, " has shape ", shape_of(tensor), "; it must be [", rows, ", ", columns, "], one row a row of ", like,
           ".");
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

  void on_device(const char* name, const Tensor& tensor) const {
    if (!tensor.is_cuda()) fail(op, ": ", name, " is not on a CUDA device; move it to the device of ", like, ".");
    if (tensor.get_device_index() != device) {
      fail(op, ": ", name, " is on cuda:", tensor.get_device_index(), " and ", like, " on cuda:", device,
           "; move both to one device.");
    }
  }

  float* values(const char* name, const OptionalTensor& tensor) const {
    if (!tensor.has_value()) return nullptr;
    on_device(name, *tensor);
    if (tensor->scalar_type() != ScalarType::Float) {
      fail(op, ": ", name, " is ", name_of(tensor->scalar_type()), "; it must be torch.float32.");
    }
    if (tensor->dim() != 1 || tensor->size(0) != rows || !tensor->is_contiguous()) {
      fail(op, ": ", name, " has shape ", shape_of(*tensor), "; it must be contiguous [", rows, "], one value a row of ", like,
           ".");
    }
    return static_cast<float*>(tensor->data_ptr());
  }

  // Targets, and from products to logits.
  void head(RowArgs& args, const Tensor& targets, double temperature, double logit_scale, std::optional<double> softcap) const {
    on_device("targets", targets);
    const ScalarType type = targets.scalar_type();
    if (type != ScalarType::Int && type != ScalarType::Long) {
      fail(op, ": targets is ", name_of(type), "; it must be torch.int32 or torch.int64.");
    }
    if (targets.dim() != 1 || targets.size(0) != rows || !targets.is_contiguous()) {
      fail(op, ": targets has shape ", shape_of(targets), "; it must be contiguous [", rows, "], one id a row of ", like, ".");
    }
    if (!(temperature > 0)) fail(op, ": temperature is ", temperature, "; it must be above 0.");
    if (softcap.has_value() && !(*softcap > 0)) fail(op, ": softcap is ", *softcap, "; it must be above 0, or None.");
    args.targets = targets.data_ptr();
    args.targets_are_64_bit = type == ScalarType::Long;
    args.rows = static_cast<int>(rows);
    args.columns = static_cast<int>(columns);
    args.temperature = static_cast<float>(temperature);
    args.logit_scale = static_cast<float>(logit_scale);
    args.softcap = softcap.has_value() ? static_cast<float>(*softcap) : 0.f;
    args.grad_scale = 1.f;
  }

  void statistics(RowArgs& args, const Tensor& logprobs, const Tensor& lse, const OptionalTensor& entropy) const {
    args.logprobs = values("logprobs", logprobs);
    args.lse = values("lse", lse);
    args.entropy = values("entropy", entropy);
  }

  void given_coefficients(RowArgs& args, const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy) const {
    args.coefficients = Coefficients::given;
    args.grad_logprobs = values("grad_logprobs", grad_logprobs);
    args.grad_entropy = values("grad_entropy", grad_entropy);
    if (args.grad_entropy != nullptr && args.entropy == nullptr) fail(op, ": grad_entropy is given, so entropy must be.");
  }
};

void require_success(const char* op, int status) {
  const auto error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next launch reports it once more
  fail(op, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error), ".");
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

// Elements of a tensor's storage from its first one on.
int64_t elements_from(const Tensor& tensor) {
  int64_t bytes = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  return bytes / static_cast<int64_t>(tensor.element_size()) - tensor.storage_offset();
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
  const Tensor& logits;
  Check check{};
  RowArgs args{};
  bool in_place_second = false;

  Call(const char* op, const Tensor& logits_, const Tensor& targets, const OptionalTensor& bias, double temperature,
       double logit_scale, std::optional<double> softcap)
      : logits(logits_) {
    if (!logits.is_cuda()) fail(op, ": logits is not on a CUDA device; this op has CUDA kernels only.");
    const ScalarType logits_type = logits.scalar_type();
    if (logits_type != ScalarType::Float && logits_type != ScalarType::BFloat16 && logits_type != ScalarType::Half) {
      fail(op, ": logits is ", name_of(logits_type), "; it must be torch.float32, torch.bfloat16 or torch.float16.");
    }
    args.logits_dtype = logits_type == ScalarType::Float      ? LogitsDtype::float32
                        : logits_type == ScalarType::BFloat16 ? LogitsDtype::bfloat16
                                                              : LogitsDtype::float16;
    // The kernels of 16-bit logits have gradients of their dtype, wanted or not.
    args.grad_dtype = logits_type == ScalarType::Half ? GradDtype::float16 : GradDtype::bfloat16;
    if (logits.dim() != 2 || logits.size(1) == 0) {
      fail(op, ": logits has shape ", shape_of(logits), "; it must be [rows, V] with V >= 1.");
    }
    // Offsets within a row, and blocks in a grid, are 32-bit numbers.
    if (logits.size(0) >= (1 << 26) || logits.size(1) >= (1 << 29)) {
      fail(op, ": logits has shape ", shape_of(logits), "; give less than 2^26 rows and 2^29 columns a call.");
    }
    check = {op, "logits", logits.size(0), logits.size(1), logits.get_device_index()};
    check.matrix("logits", logits);
    check.head(args, targets, temperature, logit_scale, softcap);
    args.logits = static_cast<float*>(logits.data_ptr());
    args.logits_pitch = logits.stride(0);
    if (bias.has_value()) {
      check.on_device("bias", *bias);
      if (bias->scalar_type() != ScalarType::Float || bias->dim() != 1 || bias->size(0) < rounded_up(args.columns) ||
          !bias->is_contiguous()) {
        fail(op, ": bias is ", name_of(bias->scalar_type()), " of shape ", shape_of(*bias),
             "; it must be contiguous torch.float32 with room for V rounded up to 4, at least [", rounded_up(args.columns),
             "].");
      }
      args.bias = static_cast<const float*>(bias->data_ptr());
      if (reinterpret_cast<uintptr_t>(args.bias) % 16 != 0) fail(op, ": bias must start at a multiple of 16 bytes.");
    }
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
    if (!has_wide_logits() && type != logits.scalar_type()) {
      fail(check.op, ": the gradient is ", name_of(type), " and logits ", name_of(logits.scalar_type()),
           "; with 16-bit logits both must have one dtype.");
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

  void factors(const OptionalTensor& factors) {
    if (factors.has_value() && args.grad_dtype != GradDtype::float16) {
      fail(check.op, ": row_factors is given and the gradient is torch.bfloat16; only torch.float16 needs them.");
    }
    args.row_factors = check.values("row_factors", factors);
  }

  bool has_wide_logits() const { return args.logits_dtype == LogitsDtype::float32; }

  // Over the logits at this offset (in elements of the gradient), or apart from them. Returns whether over.
  bool place(const char* name, const Tensor& grad, int64_t offset) const {
    check.on_device(name, grad);
    check.matrix(name, grad);
    if (logits.size(0) == 0 || !overlap(grad, logits)) return false;
    const char* start = static_cast<const char*>(logits.data_ptr()) + 2 * offset;
    const int64_t pitch = (has_wide_logits() ? 2 : 1) * logits.stride(0);
    if (grad.data_ptr() != start || grad.stride(0) != pitch) {
      fail(check.op, ": ", name, " overlaps logits; it must lie apart from them, or exactly over a half of their rows (over all ",
           "of 16-bit ones).");
    }
    return true;
  }

  void launch() {
    const int device = logits.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = stream_of(check.op, device);
    const bool once = args.grad != nullptr && args.coefficients != Coefficients::given;
    if (once && has_wide_logits() && fastgrpo_row_cluster_serves(args.columns, device) > 0) {
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
  call.check.statistics(call.args, logprobs, lse, entropy);
  call.gradients(logprob_grad, entropy_grad, grad_scale);
  call.launch();
}

ObjectiveParams objective_params(const char* op, int64_t loss_type, double epsilon_low, double epsilon_high, double delta,
                                 double beta, bool bias_correct_kl, double sapo_temperature_pos,
                                 double sapo_temperature_neg) {
  if (loss_type < 0 || loss_type > static_cast<int64_t>(LossType::vespo)) {
    fail(op, ": loss_type is ", loss_type, "; it must be a place in fastgrpo.objective.LOSS_TYPES.");
  }
  return {static_cast<LossType>(loss_type), epsilon_low, epsilon_high, delta, beta, bias_correct_kl, sapo_temperature_pos,
          sapo_temperature_neg};
}

// The objective of a call and what it takes of every row.
void objective(const Check& check, RowArgs& args, const Tensor& advantages, const Tensor& token_weights,
               const OptionalTensor& old_logprobs, const OptionalTensor& ref_logprobs, const OptionalTensor& multiplier,
               const OptionalTensor& phi, const OptionalTensor& entropy_weights, const ObjectiveParams& params) {
  if (params.beta != 0 && !ref_logprobs.has_value()) {
    fail(check.op, ": beta is ", params.beta, ", so ref_logprobs must be given.");
  }
  args.coefficients = Coefficients::objective;
  args.params = params;
  args.advantages = check.values("advantages", advantages);
  args.token_weights = check.values("token_weights", token_weights);
  args.old_logprobs = check.values("old_logprobs", old_logprobs);
  args.ref_logprobs = check.values("ref_logprobs", ref_logprobs);
  args.multiplier = check.values("multiplier", multiplier);
  args.phi = check.values("phi", phi);
  args.entropy_weights = check.values("entropy_weights", entropy_weights);
}

void row_objective(const Tensor& logits, const Tensor& targets, const OptionalTensor& bias, double temperature,
                   double logit_scale, std::optional<double> softcap, const Tensor& logprobs, const Tensor& lse,
                   const OptionalTensor& entropy, const Tensor& advantages, const Tensor& token_weights,
                   const OptionalTensor& old_logprobs, const OptionalTensor& ref_logprobs,
                   const OptionalTensor& multiplier, const OptionalTensor& phi, const OptionalTensor& entropy_weights,
                   int64_t loss_type, double epsilon_low, double epsilon_high, double delta, double beta,
                   bool bias_correct_kl, double sapo_temperature_pos, double sapo_temperature_neg, const Tensor& grad,
                   double grad_scale, const OptionalTensor& row_factors) {
  Call call("row_objective", logits, targets, bias, temperature, logit_scale, softcap);
  call.check.statistics(call.args, logprobs, lse, entropy);
  call.gradients(grad, std::nullopt, grad_scale);
  call.factors(row_factors);
  objective(call.check, call.args, advantages, token_weights, old_logprobs, ref_logprobs, multiplier, phi, entropy_weights,
            objective_params("row_objective", loss_type, epsilon_low, epsilon_high, delta, beta, bias_correct_kl,
                             sapo_temperature_pos, sapo_temperature_neg));
  call.launch();
}

void row_grad(const Tensor& logits, const Tensor& targets, const OptionalTensor& bias, double temperature,
              double logit_scale, std::optional<double> softcap, const Tensor& logprobs, const Tensor& lse,
              const OptionalTensor& entropy, const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy,
              const Tensor& grad, double grad_scale, const OptionalTensor& row_factors) {
  Call call("row_grad", logits, targets, bias, temperature, logit_scale, softcap);
  call.check.statistics(call.args, logprobs, lse, entropy);
  call.gradients(grad, std::nullopt, grad_scale);
  call.factors(row_factors);
  call.check.given_coefficients(call.args, grad_logprobs, grad_entropy);
  call.launch();
}

// A call of the head whose product and passes are one kernel.
struct FusedCall {
  const Tensor& hidden;
  Check check{};
  FusedHeadArgs args{};

  FusedCall(const char* op, FusedPass pass, const Tensor& hidden_, const Tensor& weight, const Tensor& targets,
            double temperature, double logit_scale, std::optional<double> softcap)
      : hidden(hidden_) {
    if (!hidden.is_cuda()) fail(op, ": hidden is not on a CUDA device; this op has CUDA kernels only.");
    if (hidden.dim() != 2 || weight.dim() != 2 || weight.size(1) != hidden.size(1)) {
      fail(op, ": hidden has shape ", shape_of(hidden), " and weight ", shape_of(weight), "; they must be [rows, H] and [V, H].");
    }
    check = {op, "hidden", hidden.size(0), weight.size(0), hidden.get_device_index()};
    if (check.columns == 0 || hidden.size(1) % 8 != 0 || hidden.size(1) == 0) {
      fail(op, ": weight has shape ", shape_of(weight), "; H must be a multiple of 8, and V at least 1. row_pass and its like serve others.");
    }
    // So that tiles can be counted in 32 bits.
    if (check.rows > (1 << 20) || check.columns > (1 << 26)) {
      fail(op, ": ", check.rows, " rows by ", check.columns, " columns; give at most 2^20 and 2^26 a call.");
    }
    if (!(logit_scale > 0)) fail(op, ": logit_scale is ", logit_scale, "; it must be above 0.");
    check.head(args.row, targets, temperature, logit_scale, softcap);
    args.pass = pass;
    args.hidden = operand("hidden", hidden);
    args.weight = operand("weight", weight);
    args.width = static_cast<int>(hidden.size(1));
  }

  const void* operand(const char* name, const Tensor& tensor) const {
    check.on_device(name, tensor);
    if (tensor.scalar_type() != ScalarType::BFloat16 || !tensor.is_contiguous() ||
        reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0) {
      fail(check.op, ": ", name, " is ", name_of(tensor.scalar_type()), " of shape ", shape_of(tensor),
           "; it must be contiguous torch.bfloat16 that starts at a multiple of 16 bytes.");
    }
    return tensor.data_ptr();
  }

  void gradients(const Tensor& grad, const Tensor& at_target) {
    args.at_target = check.values("at_target", at_target);
    check.on_device("the gradient", grad);
    check.matrix("the gradient", grad);
    if (grad.scalar_type() != ScalarType::BFloat16) {
      fail(check.op, ": the gradient is ", name_of(grad.scalar_type()), "; it must be torch.bfloat16.");
    }
    const int64_t written = (check.columns + 31) / 32 * 32;
    if (check.rows > 0 && (grad.stride(0) % 8 != 0 || grad.stride(0) < written)) {
      fail(check.op, ": the rows of the gradient are ", grad.stride(0), " elements apart; they must be a multiple of 8 apart, and ",
           written, " at least, which a row is written to.");
    }
    if (check.rows > 0 && elements_from(grad) < (check.rows - 1) * grad.stride(0) + written) {
      fail(check.op, ": the gradient has ", elements_from(grad), " elements of memory; its last row, too, is written to column ",
           written, ".");
    }
    args.row.grad = grad.data_ptr();
    args.row.grad_pitch = grad.stride(0);
  }

  void exponentials(const Tensor& grad, const Tensor& at_target, const Tensor& row_factors) {
    gradients(grad, at_target);
    args.row.row_factors = check.values("row_factors", row_factors);
  }

  // Places in one tensor.
  void scratch(const Tensor& scratch) {
    check.on_device("scratch", scratch);
    const int64_t strips = fastgrpo_fused_head_strips(args.row.columns), wanted = check.rows * (4 * strips + 2) + 1;
    if (scratch.scalar_type() != ScalarType::Float || !scratch.is_contiguous() || scratch.numel() < wanted ||
        reinterpret_cast<uintptr_t>(scratch.data_ptr()) % 16 != 0) {
      fail(check.op, ": scratch is ", name_of(scratch.scalar_type()), " with ", scratch.numel(),
           " elements; it must be contiguous torch.float32 with at least ", wanted, ": rows x (4 x strips of 256 columns + 2) + 1.");
    }
    float* place = static_cast<float*>(scratch.data_ptr());
    args.partials = reinterpret_cast<float4*>(place);
    args.shifts2 = place + check.rows * 4 * strips;
    args.target_products = args.shifts2 + check.rows;
    args.repeat = reinterpret_cast<int*>(args.target_products + check.rows);
  }

  void launch() const {
    const torch::stable::accelerator::DeviceGuard guard(check.device);
    void* stream = stream_of(check.op, check.device);
    require_success(check.op, fastgrpo_fused_head(&args, stream));
  }
};

void fused_pass(const Tensor& hidden, const Tensor& weight, const Tensor& targets, double temperature, double logit_scale,
                std::optional<double> softcap, const Tensor& logprobs, const Tensor& lse, const OptionalTensor& entropy,
                const OptionalTensor& grad, const OptionalTensor& at_target, const OptionalTensor& row_factors,
                const Tensor& scratch) {
  if (grad.has_value() != row_factors.has_value() || grad.has_value() != at_target.has_value()) {
    fail("fused_pass: grad, at_target and row_factors go together; give all or none.");
  }
  const FusedPass pass = grad.has_value() ? FusedPass::exponentials : FusedPass::statistics;
  FusedCall call("fused_pass", pass, hidden, weight, targets, temperature, logit_scale, softcap);
  call.check.statistics(call.args.row, logprobs, lse, entropy);
  if (grad.has_value()) call.exponentials(*grad, *at_target, *row_factors);
  call.scratch(scratch);
  call.launch();
}

void fused_objective(const Tensor& hidden, const Tensor& weight, const Tensor& targets, double temperature, double logit_scale,
                     std::optional<double> softcap, const Tensor& logprobs, const Tensor& lse, const OptionalTensor& entropy,
                     const Tensor& advantages, const Tensor& token_weights, const OptionalTensor& old_logprobs,
                     const OptionalTensor& ref_logprobs, const OptionalTensor& multiplier, const OptionalTensor& phi,
                     int64_t loss_type, double epsilon_low, double epsilon_high, double delta, double beta,
                     bool bias_correct_kl, double sapo_temperature_pos, double sapo_temperature_neg, const Tensor& grad,
                     const Tensor& at_target, const Tensor& row_factors, const Tensor& scratch) {
  FusedCall call("fused_objective", FusedPass::exponentials, hidden, weight, targets, temperature, logit_scale, softcap);
  call.check.statistics(call.args.row, logprobs, lse, entropy);
  call.exponentials(grad, at_target, row_factors);
  call.scratch(scratch);
  objective(call.check, call.args.row, advantages, token_weights, old_logprobs, ref_logprobs, multiplier, phi, std::nullopt,
            objective_params("fused_objective", loss_type, epsilon_low, epsilon_high, delta, beta, bias_correct_kl,
                             sapo_temperature_pos, sapo_temperature_neg));
  call.launch();
}

void fused_grad(const Tensor& hidden, const Tensor& weight, const Tensor& targets, double temperature, double logit_scale,
                std::optional<double> softcap, const Tensor& logprobs, const Tensor& lse, const OptionalTensor& entropy,
                const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy, const Tensor& grad,
                const Tensor& at_target) {
  FusedCall call("fused_grad", FusedPass::gradients, hidden, weight, targets, temperature, logit_scale, softcap);
  call.check.statistics(call.args.row, logprobs, lse, entropy);
  call.gradients(grad, at_target);
  call.check.given_coefficients(call.args.row, grad_logprobs, grad_entropy);
  call.launch();
}

// What the ops over rows of a matrix and their targets or factors have in common.
struct RowsOf {
  Check check;

  RowsOf(const char* op, const char* name, const Tensor& rows)
      : check{op, name, rows.dim() == 2 ? rows.size(0) : 0, rows.dim() == 2 ? rows.size(1) : 0, 0} {
    if (!rows.is_cuda()) fail(op, ": ", name, " is not on a CUDA device; this op has CUDA kernels only.");
    check.device = rows.get_device_index();
  }

  // [any, H].
  void* matrix(const char* name, const Tensor& tensor, ScalarType type) const {
    check.on_device(name, tensor);
    if (tensor.scalar_type() != type || tensor.dim() != 2 || tensor.size(1) != check.columns || check.columns % 4 != 0 ||
        !tensor.is_contiguous() || reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0) {
      fail(check.op, ": ", name, " is ", name_of(tensor.scalar_type()), " of shape ", shape_of(tensor), "; it must be contiguous ",
           name_of(type), " [..., ", check.columns, "], a multiple of 4 wide, that starts at a multiple of 16 bytes.");
    }
    return tensor.data_ptr();
  }

  // [R, H].
  void* matrix_of_rows(const char* name, const Tensor& tensor, ScalarType type) const {
    void* data = matrix(name, tensor, type);
    if (tensor.size(0) != check.rows) fail(check.op, ": ", name, " has ", tensor.size(0), " rows; it must have ", check.rows, ".");
    return data;
  }

  const int64_t* targets(const Tensor& targets) const {
    check.on_device("targets", targets);
    if (targets.scalar_type() != ScalarType::Long || targets.dim() != 1 || targets.size(0) != check.rows ||
        !targets.is_contiguous()) {
      fail(check.op, ": targets is ", name_of(targets.scalar_type()), " of shape ", shape_of(targets),
           "; it must be contiguous torch.int64 [", check.rows, "].");
    }
    return static_cast<const int64_t*>(targets.data_ptr());
  }

  template <typename Launcher, typename... Arguments>
  void launch(Launcher launcher, Arguments... arguments) const {
    const torch::stable::accelerator::DeviceGuard guard(check.device);
    void* stream = stream_of(check.op, check.device);
    require_success(check.op, launcher(arguments..., static_cast<int>(check.rows), static_cast<int>(check.columns), stream));
  }
};

void finish_hidden_grad(const Tensor& out, const OptionalTensor& factors, const Tensor& at_target, const Tensor& targets,
                 const Tensor& weight, double scale) {
  const RowsOf rows("finish_hidden_grad", "out", out);
  auto* into = static_cast<float*>(rows.matrix("out", out, ScalarType::Float));
  const void* words = rows.matrix("weight", weight, ScalarType::BFloat16);
  rows.launch(fastgrpo_finish_hidden_grad, into, rows.check.values("factors", factors), rows.check.values("at_target", at_target),
              rows.targets(targets), words, weight.size(0), static_cast<float>(scale));
}

void add_to_targets(const Tensor& total, const Tensor& at_target, const Tensor& targets, const Tensor& hidden, double scale) {
  const RowsOf rows("add_to_targets", "hidden", hidden);
  auto* into = static_cast<float*>(rows.matrix("total", total, ScalarType::Float));
  const void* states = rows.matrix("hidden", hidden, ScalarType::BFloat16);
  rows.launch(fastgrpo_add_to_targets, into, rows.check.values("at_target", at_target), rows.targets(targets), states,
              total.size(0), static_cast<float>(scale));
}

void take_targets(const Tensor& values, const Tensor& targets, const Tensor& out) {
  const RowsOf rows("take_targets", "values", values);
  rows.check.matrix("values", values);
  rows.check.on_device("out", out);
  if (values.scalar_type() != ScalarType::BFloat16 || out.scalar_type() != ScalarType::BFloat16) {
    fail("take_targets: values is ", name_of(values.scalar_type()), " and out ", name_of(out.scalar_type()),
         "; both must be torch.bfloat16.");
  }
  if (out.dim() != 2 || out.size(0) != rows.check.rows || out.size(1) < rows.check.rows || !out.is_contiguous()) {
    fail("take_targets: out has shape ", shape_of(out), "; it must be contiguous [", rows.check.rows, ", ", rows.check.rows,
         " or more].");
  }
  rows.launch(fastgrpo_take_targets, values.data_ptr(), values.stride(0), rows.targets(targets), out.data_ptr(), out.size(1));
}

void round_at_targets(const Tensor& total, const Tensor& sums, const Tensor& at_target, const Tensor& targets,
                      const Tensor& hidden, double scale) {
  const RowsOf rows("round_at_targets", "hidden", hidden);
  void* into = rows.matrix("total", total, ScalarType::BFloat16);
  const auto* others = static_cast<const float*>(rows.matrix_of_rows("sums", sums, ScalarType::Float));
  const void* states = rows.matrix("hidden", hidden, ScalarType::BFloat16);
  rows.launch(fastgrpo_round_at_targets, into, others, rows.check.values("at_target", at_target), rows.targets(targets), states,
              total.size(0), static_cast<float>(scale));
}

void scale_rows(const Tensor& hidden, const Tensor& factors, const Tensor& out) {
  const RowsOf rows("scale_rows", "hidden", hidden);
  void* into = rows.matrix_of_rows("out", out, ScalarType::BFloat16);
  const void* values = rows.matrix("hidden", hidden, ScalarType::BFloat16);
  rows.launch(fastgrpo_scale_rows, values, rows.check.values("factors", factors), into);
}

GradDtype grad_dtype_of(const char* op, const Tensor& out, const char* name = "out") {
  const ScalarType type = out.scalar_type();
  if (type != ScalarType::BFloat16 && type != ScalarType::Half) {
    fail(op, ": ", name, " is ", name_of(type), "; it must be torch.bfloat16 or torch.float16.");
  }
  return type == ScalarType::Half ? GradDtype::float16 : GradDtype::bfloat16;
}

// Contiguous arrays of one call, all on the device of the tensor named `like`.
struct Arrays {
  const char* op;
  const char* like_name;
  const Tensor& like;

  Arrays(const char* op_, const char* like_name_, const Tensor& like_) : op(op_), like_name(like_name_), like(like_) {
    if (!like.is_cuda()) fail(op, ": ", like_name, " is not on a CUDA device; this op has CUDA kernels only.");
  }

  void* array(const char* name, const Tensor& tensor, ScalarType type, int64_t count) const {
    if (!tensor.is_cuda() || tensor.get_device_index() != like.get_device_index()) {
      fail(op, ": ", name, " is not on the device of ", like_name, "; move it there.");
    }
    if (tensor.scalar_type() != type || tensor.numel() != count || !tensor.is_contiguous()) {
      fail(op, ": ", name, " is ", name_of(tensor.scalar_type()), " of shape ", shape_of(tensor), "; it must be contiguous ",
           name_of(type), " with ", count, " elements.");
    }
    return tensor.data_ptr();
  }

  float* floats(const char* name, const OptionalTensor& tensor, int64_t count) const {
    return tensor.has_value() ? static_cast<float*>(array(name, *tensor, ScalarType::Float, count)) : nullptr;
  }

  int64_t* longs(const char* name, const OptionalTensor& tensor, int64_t count) const {
    return tensor.has_value() ? static_cast<int64_t*>(array(name, *tensor, ScalarType::Long, count)) : nullptr;
  }

  // int32 or int64; returns whether 64 bit.
  bool ids(const char* name, const Tensor& tensor, int64_t count, const void*& data) const {
    const ScalarType type = tensor.scalar_type();
    const bool is_long = type == ScalarType::Long;
    if (!is_long && type != ScalarType::Int) {
      fail(op, ": ", name, " is ", name_of(type), "; it must be contiguous torch.int32 or torch.int64 with ", count, " elements.");
    }
    data = array(name, tensor, is_long ? ScalarType::Long : ScalarType::Int, count);
    return is_long;
  }

  // One value a sequence, or one a row; returns whether a row.
  bool per_row(const char* name, const Tensor& tensor, int64_t sequences, int64_t rows) const {
    if (tensor.numel() != sequences && tensor.numel() != rows) {
      fail(op, ": ", name, " has shape ", shape_of(tensor), "; it must have ", sequences, " elements, one a sequence, or ", rows,
           ", one a row.");
    }
    return tensor.numel() != sequences;
  }

  template <typename Launcher, typename... Values>
  void launch(Launcher launcher, const Values&... values) const {
    const int device = like.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = stream_of(op, device);
    require_success(op, launcher(values..., stream));
  }
};

void scale_round(const Tensor& values, const Tensor& factor, const Tensor& out) {
  const Arrays arrays("scale_round", "out", out);
  const GradDtype dtype = grad_dtype_of(arrays.op, out);
  const float* from = arrays.floats("values", values, out.numel());
  const float* by = arrays.floats("factor", factor, 1);
  void* into = arrays.array("out", out, out.scalar_type(), out.numel());
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(into)) % 16 != 0) {
    fail(arrays.op, ": values and out must start at a multiple of 16 bytes.");
  }
  arrays.launch(fastgrpo_scale_round, from, by, into, dtype, out.numel());
}

void weigh_slopes(const OptionalTensor& grad_logprobs, const Tensor& logprob_slope, const OptionalTensor& grad_entropy,
                  const OptionalTensor& entropy_slope, const Tensor& targets, int64_t vocabulary, const Tensor& out) {
  const Arrays arrays("weigh_slopes", "out", out);
  if (out.dim() != 2) fail(arrays.op, ": out has shape ", shape_of(out), "; it must be [rows, width].");
  const GradDtype dtype = grad_dtype_of(arrays.op, out);
  const int64_t rows = out.size(0), width = out.size(1);
  if (rows >= (int64_t{1} << 31) || width >= (int64_t{1} << 31)) {
    fail(arrays.op, ": out has shape ", shape_of(out), ", which is too large.");
  }
  const float* g = arrays.floats("grad_logprobs", grad_logprobs, rows);
  const float* u = arrays.floats("logprob_slope", logprob_slope, rows * width);
  const float* h = arrays.floats("grad_entropy", grad_entropy, rows);
  const float* v = arrays.floats("entropy_slope", entropy_slope, rows * width);
  if (h != nullptr && v == nullptr) fail(arrays.op, ": grad_entropy is given, so entropy_slope must be.");
  const int64_t* ids = arrays.longs("targets", targets, rows);
  void* into = arrays.array("out", out, out.scalar_type(), out.numel());
  arrays.launch(fastgrpo_weigh_slopes, g, u, h, v, ids, vocabulary, into, dtype, static_cast<int>(rows),
                static_cast<int>(width));
}

// Without what a row is wanted for, and the counts.
CompactArgs compact_args(const Arrays& arrays, const Tensor& targets, int64_t vocabulary, const Tensor& wanted,
                         const OptionalTensor& others) {
  CompactArgs args{};
  args.rows = targets.numel();
  if (args.rows >= (int64_t{1} << 31)) fail(arrays.op, ": there are ", args.rows, " targets; give less than 2^31 a call.");
  args.vocabulary = vocabulary;
  args.targets_are_64_bit = arrays.ids("targets", targets, args.rows, args.targets);
  args.wanted = arrays.longs("wanted", wanted, args.rows);
  args.others = arrays.longs("others", others, args.rows);
  return args;
}

void compact_rows(const Tensor& targets, int64_t vocabulary, const OptionalTensor& first, const OptionalTensor& second,
                  const Tensor& wanted, const OptionalTensor& others, const Tensor& counts) {
  const Arrays arrays("compact_rows", "targets", targets);
  CompactArgs args = compact_args(arrays, targets, vocabulary, wanted, others);
  args.first = arrays.floats("first", first, args.rows);
  args.second = arrays.floats("second", second, args.rows);
  args.counts = arrays.longs("counts", counts, 1);
  arrays.launch(fastgrpo_compact, &args);
}

int sequences_of(const char* op, int64_t count) {
  if (count < 0 || count >= (int64_t{1} << 31)) fail(op, ": there are ", count, " sequences; give 1 to 2^31 - 1.");
  return static_cast<int>(count);
}

void grpo_rows(const Tensor& segments, const Tensor& targets, int64_t vocabulary, const OptionalTensor& mask,
               const Tensor& advantages, const OptionalTensor& sampler_ratio, int64_t normaliser, double factor,
               double accumulation, const OptionalTensor& items, double items_factor, double entropy_coef, double k_pos,
               double lambda_pos, double k_neg, double lambda_neg, bool by_advantage, const Tensor& counted_targets,
               const Tensor& wanted, const Tensor& others, const Tensor& row_advantages, const Tensor& weights,
               const OptionalTensor& multiplier, const OptionalTensor& phi, const OptionalTensor& entropy_weights, const OptionalTensor& phi_of_sequence,
               const Tensor& sizes, const Tensor& counts) {
  const Arrays arrays("grpo_rows", "segments", segments);
  if (normaliser < 0 || normaliser > static_cast<int64_t>(Normaliser::sequence)) {
    fail("grpo_rows: normaliser is ", normaliser, "; it must be a place in Normaliser of csrc/cuda/grpo.h.");
  }
  const int64_t rows = targets.numel();
  GrpoRowsArgs args{};
  args.sequences = sequences_of(arrays.op, segments.numel() - 1);
  args.rows = rows;
  args.vocabulary = vocabulary;
  args.segments_are_64_bit = arrays.ids("segments", segments, segments.numel(), args.segments);
  args.targets_are_64_bit = arrays.ids("targets", targets, rows, args.targets);
  if (mask.has_value()) args.mask = static_cast<const bool*>(arrays.array("mask", *mask, ScalarType::Bool, rows));
  args.advantages_per_row = arrays.per_row("advantages", advantages, args.sequences, rows);
  args.advantages = arrays.floats("advantages", advantages, advantages.numel());
  if (sampler_ratio.has_value()) {
    args.sampler_ratio_per_row = arrays.per_row("sampler_ratio", *sampler_ratio, args.sequences, rows);
    args.sampler_ratio = arrays.floats("sampler_ratio", sampler_ratio, sampler_ratio->numel());
  }
  args.normaliser = static_cast<Normaliser>(normaliser);
  args.factor = factor, args.accumulation = accumulation, args.items_factor = items_factor, args.entropy_coef = entropy_coef;
  args.items = arrays.floats("items", items, 1);
  args.k_pos = k_pos, args.lambda_pos = lambda_pos, args.k_neg = k_neg, args.lambda_neg = lambda_neg;
  args.counted_targets = arrays.longs("counted_targets", counted_targets, rows);
  args.row_advantages = arrays.floats("row_advantages", row_advantages, rows);
  args.weights = arrays.floats("weights", weights, rows);
  args.multiplier = arrays.floats("multiplier", multiplier, rows);
  args.phi = arrays.floats("phi", phi, rows);
  args.entropy_weights = arrays.floats("entropy_weights", entropy_weights, rows);
  args.phi_of_sequence = arrays.floats("phi_of_sequence", phi_of_sequence, args.sequences);
  args.sizes = arrays.longs("sizes", sizes, 5);
  if (args.multiplier != nullptr && args.sampler_ratio == nullptr) fail("grpo_rows: multiplier is wanted without sampler_ratio.");
  if (args.phi_of_sequence != nullptr && args.advantages_per_row) fail("grpo_rows: phi_of_sequence needs advantages a sequence.");
  // From what the first kernel gives.
  CompactArgs compact = compact_args(arrays, counted_targets, vocabulary, wanted, others);
  if (by_advantage) compact.first = args.row_advantages;
  compact.valid = args.sizes + 4;
  compact.counts = arrays.longs("counts", counts, 1);
  arrays.launch(
      [](const GrpoRowsArgs* args, const CompactArgs* compact, void* stream) {
        const int error = fastgrpo_grpo_rows(args, stream);
        return error ? error : fastgrpo_compact(compact, stream);
      },
      &args, &compact);
}

void grpo_sums(const OptionalTensor& segments, const Tensor& counted_targets, const Tensor& logprobs,
               const Tensor& advantages, const Tensor& weights, const OptionalTensor& entropy,
               const OptionalTensor& old_logprobs, const OptionalTensor& ref_logprobs, const OptionalTensor& multiplier,
               const OptionalTensor& phi, const OptionalTensor& entropy_weights,
               const OptionalTensor& sequence_advantages, const OptionalTensor& phi_of_sequence, int64_t loss_type,
               double epsilon_low, double epsilon_high, double delta, double beta, bool bias_correct_kl,
               double sapo_temperature_pos, double sapo_temperature_neg, double policy_scale, bool sequence_level,
               const Tensor& partials, const Tensor& sums, const Tensor& clips) {
  const Arrays arrays("grpo_sums", "logprobs", logprobs);
  const int64_t rows = logprobs.numel();
  GrpoSumsArgs args{};
  args.sequences = sequences_of(arrays.op, segments.has_value() ? segments->numel() - 1 : clips.numel() / 2);
  if (segments.has_value()) args.segments_are_64_bit = arrays.ids("segments", *segments, args.sequences + 1, args.segments);
  args.rows = rows;
  args.counted_targets = arrays.longs("counted_targets", counted_targets, rows);
  args.params = objective_params(arrays.op, loss_type, epsilon_low, epsilon_high, delta, beta, bias_correct_kl,
                                 sapo_temperature_pos, sapo_temperature_neg);
  if (beta != 0 && !ref_logprobs.has_value()) fail("grpo_sums: beta is ", beta, ", so ref_logprobs must be given.");
  if (sequence_level && !sequence_advantages.has_value()) fail("grpo_sums: sequence_level needs sequence_advantages.");
  args.policy_scale = policy_scale;
  args.sequence_level = sequence_level;
  args.logprobs = arrays.floats("logprobs", logprobs, rows);
  args.advantages = arrays.floats("advantages", advantages, rows);
  args.weights = arrays.floats("weights", weights, rows);
  args.entropy = arrays.floats("entropy", entropy, rows);
  args.old_logprobs = arrays.floats("old_logprobs", old_logprobs, rows);
  args.ref_logprobs = arrays.floats("ref_logprobs", ref_logprobs, rows);
  args.multiplier = arrays.floats("multiplier", multiplier, rows);
  args.phi = arrays.floats("phi", phi, rows);
  args.entropy_weights = arrays.floats("entropy_weights", entropy_weights, rows);
  args.sequence_advantages = arrays.floats("sequence_advantages", sequence_advantages, args.sequences);
  args.phi_of_sequence = arrays.floats("phi_of_sequence", phi_of_sequence, args.sequences);
  args.partials = static_cast<double*>(
      arrays.array("partials", partials, ScalarType::Double, int64_t{args.sequences} * (kGrpoSums + 1)));
  args.sums = arrays.floats("sums", sums, 2 * kGrpoSums);
  args.clips = arrays.floats("clips", clips, int64_t{2} * args.sequences);
  arrays.launch(fastgrpo_grpo_sums, &args);
}

void left_pack(const Tensor& mask, const Tensor& index, const Tensor& counts) {
  const Arrays arrays("left_pack_into", "mask", mask);
  const ScalarType type = mask.scalar_type();
  if (type != ScalarType::Bool && type != ScalarType::Byte && type != ScalarType::Int && type != ScalarType::Long) {
    fail(arrays.op, ": mask is ", name_of(type), "; it must be torch.bool, uint8, int32 or int64.");
  }
  if (mask.dim() != 2 || mask.size(0) >= (int64_t{1} << 31) || mask.size(1) >= (int64_t{1} << 31)) {
    fail(arrays.op, ": mask has shape ", shape_of(mask), "; it must be [rows, width], each below 2^31.");
  }
  LeftPackArgs args{};
  args.mask = arrays.array("mask", mask, type, mask.numel());
  args.mask_bytes = static_cast<int>(mask.element_size());
  args.rows = static_cast<int>(mask.size(0)), args.width = static_cast<int>(mask.size(1));
  args.index = arrays.longs("index", index, mask.numel());
  args.counts = arrays.longs("counts", counts, args.rows);
  arrays.launch(fastgrpo_left_pack, &args);
}

void take_rows(const Tensor& values, const Tensor& rows, int64_t pattern, const Tensor& out) {
  const Arrays arrays("take_rows_into", "values", values);
  if (values.dim() == 0 || out.dim() == 0) fail(arrays.op, ": values and out must be [rows, ...].");
  TakeRowsArgs args{};
  args.count = rows.numel();
  const int64_t width = args.count > 0 ? out.numel() / args.count : 0;
  if (values.numel() != values.size(0) * width && args.count > 0) {
    fail(arrays.op, ": values has shape ", shape_of(values), " and out ", shape_of(out), "; rows of both must be as long.");
  }
  args.values = arrays.array("values", values, values.scalar_type(), values.numel());
  args.rows = arrays.longs("rows", rows, args.count);
  args.out = arrays.array("out", out, values.scalar_type(), args.count * width);
  args.row_bytes = width * static_cast<int64_t>(values.element_size());
  args.pattern = static_cast<uint64_t>(pattern);
  arrays.launch(fastgrpo_take_rows, &args);
}

RowDtype row_dtype_of(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return RowDtype::float32;
    case ScalarType::BFloat16: return RowDtype::bfloat16;
    case ScalarType::Half: return RowDtype::float16;
    default: fail(op, ": ", name, " is ", name_of(tensor.scalar_type()), "; it must be torch.float32, torch.bfloat16 or torch.float16.");
  }
}

void sum_rows(const Tensor& grads, const Tensor& order, const Tensor& start, const Tensor& out) {
  const Arrays arrays("sum_rows_into", "grads", grads);
  if (grads.dim() != 2 || out.dim() != 2 || grads.size(1) != out.size(1) || out.size(1) >= (int64_t{1} << 31)) {
    fail(arrays.op, ": grads has shape ", shape_of(grads), " and out ", shape_of(out), "; both must be [*, width].");
  }
  SumRowsArgs args{};
  args.dtype = row_dtype_of(arrays.op, "grads", grads);
  const ScalarType type = grads.scalar_type();
  args.grads = arrays.array("grads", grads, type, grads.numel());
  args.order = arrays.longs("order", order, grads.size(0));
  args.rows = out.size(0);
  args.start = arrays.longs("start", start, args.rows + 1);
  args.out = arrays.array("out", out, type, out.numel());
  args.width = static_cast<int>(out.size(1));
  arrays.launch(fastgrpo_sum_rows, &args);
}

void merge_attention(const Tensor& out, const Tensor& lse, const Tensor& more, const Tensor& more_lse,
                     const Tensor& continued, const Tensor& merged_lse) {
  const Arrays arrays("merge_attention", "out", out);
  const char* op = arrays.op;
  if (out.dim() != 3 || out.size(2) % 8 != 0) {
    fail(op, ": out has shape ", shape_of(out), "; it must be [tokens, heads, width] with a width that 8 divides.");
  }
  const GradDtype dtype = grad_dtype_of(op, out);
  const int64_t tokens = out.size(0), heads = out.size(1), width = out.size(2);
  if (out.numel() / 8 >= (int64_t{1} << 31)) fail(op, ": out has shape ", shape_of(out), ", which is too large.");
  void* into = arrays.array("out", out, out.scalar_type(), out.numel());
  const void* from = arrays.array("more", more, out.scalar_type(), out.numel());
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(into)) % 16 != 0) {
    fail(op, ": out and more must start at a multiple of 16 bytes.");
  }
  const auto values = [&](const char* name, const Tensor& tensor) {
    return arrays.floats(name, tensor, tokens * heads);
  };
  const auto* marks = static_cast<const bool*>(arrays.array("continued", continued, ScalarType::Bool, tokens));
  const float *first = values("lse", lse), *second = values("more_lse", more_lse);
  float* total = values("merged_lse", merged_lse);
  arrays.launch(fastgrpo_merge_attention, into, first, from, second, marks, total, dtype, static_cast<int>(tokens),
                static_cast<int>(heads), static_cast<int>(width));
}

void rotary(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin, const Tensor& out_query,
            const Tensor& out_key, bool transposed) {
  const Tensor& out = out_query;
  const Arrays arrays("rotary", "out_query", out);
  const char* op = arrays.op;
  if (out.dim() != 3 || out.size(2) % 16 != 0) {
    fail(op, ": out_query has shape ", shape_of(out), "; it must be [tokens, heads, width] with a width that 16 divides.");
  }
  const int64_t tokens = out.size(0), heads = out.size(1), width = out.size(2);
  if (key.dim() != 3 || key.size(0) != tokens || key.size(2) != width) {
    fail(op, ": key has shape ", shape_of(key), " and out_query ", shape_of(out), "; only their heads may differ.");
  }
  if ((out.numel() + key.numel()) / 16 >= (int64_t{1} << 31)) fail(op, ": out_query has shape ", shape_of(out), ", which is too large.");
  const GradDtype dtype = grad_dtype_of(op, out, "out_query");
  const auto values = [&](const char* name, const Tensor& tensor, int64_t count) {
    void* at = arrays.array(name, tensor, out.scalar_type(), count);
    if (reinterpret_cast<uintptr_t>(at) % 16 != 0) fail(op, ": ", name, " must start at a multiple of 16 bytes.");
    return at;
  };
  const void *q = values("query", query, out.numel()), *k = values("key", key, key.numel());
  const void *c = values("cos", cos, tokens * width), *s = values("sin", sin, tokens * width);
  void *into_q = values("out_query", out, out.numel()), *into_k = values("out_key", out_key, key.numel());
  arrays.launch(fastgrpo_rotary, q, k, c, s, into_q, into_k, dtype, static_cast<int>(tokens), static_cast<int>(heads),
                static_cast<int>(key.size(1)), static_cast<int>(width), transposed);
}

// The arrays of one call of a swiglu op: as many numbers of one dtype in each.
struct SwigluArrays {
  const Arrays arrays;
  const RowDtype dtype;
  const int64_t count;

  SwigluArrays(const char* op, const Tensor& gate)
      : arrays(op, "gate", gate), dtype(row_dtype_of(op, "gate", gate)), count(gate.numel()) {
    if (count % 8 != 0 || count / 4 >= (int64_t{1} << 31) - 256) {
      fail(op, ": gate has shape ", shape_of(gate), "; 8 must divide the number of its elements, below 2^33 - 1024.");
    }
  }

  void* operator()(const char* name, const Tensor& tensor) const {
    void* at = arrays.array(name, tensor, arrays.like.scalar_type(), count);
    if (reinterpret_cast<uintptr_t>(at) % 16 != 0) fail(arrays.op, ": ", name, " must start at a multiple of 16 bytes.");
    return at;
  }
};

void swiglu(const Tensor& gate, const Tensor& up, const Tensor& product) {
  const SwigluArrays values("swiglu", gate);
  const void *g = values("gate", gate), *u = values("up", up);
  void* p = values("product", product);
  values.arrays.launch(fastgrpo_swiglu, g, u, p, values.dtype, values.count);
}

void swiglu_grad(const Tensor& gate, const Tensor& up, const Tensor& grad, const Tensor& grad_gate, const Tensor& grad_up,
                 const OptionalTensor& product) {
  const SwigluArrays values("swiglu_grad", gate);
  const void *g = values("gate", gate), *u = values("up", up), *d = values("grad", grad);
  void *into_g = values("grad_gate", grad_gate), *into_u = values("grad_up", grad_up);
  void* p = product.has_value() ? values("product", *product) : nullptr;
  values.arrays.launch(fastgrpo_swiglu_grad, g, u, d, into_g, into_u, p, values.dtype, values.count);
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
      "float sapo_temperature_pos, float sapo_temperature_neg, Tensor(e!) grad, float grad_scale, "
      "Tensor(f!)? row_factors=None) -> ()");
  m.def(
      "row_grad(Tensor(a!) logits, Tensor targets, Tensor? bias, float temperature, float logit_scale, float? softcap, "
      "Tensor logprobs, Tensor lse, Tensor? entropy, Tensor? grad_logprobs, Tensor? grad_entropy, Tensor(b!) grad, "
      "float grad_scale, Tensor(c!)? row_factors=None) -> ()");
  m.def(
      "fused_pass(Tensor hidden, Tensor weight, Tensor targets, float temperature, float logit_scale, float? softcap, "
      "Tensor(a!) logprobs, Tensor(b!) lse, Tensor(c!)? entropy, Tensor(d!)? grad, Tensor(e!)? at_target, "
      "Tensor(f!)? row_factors, Tensor(g!) scratch) -> ()");
  m.def(
      "fused_objective(Tensor hidden, Tensor weight, Tensor targets, float temperature, float logit_scale, float? softcap, "
      "Tensor(a!) logprobs, Tensor(b!) lse, Tensor(c!)? entropy, Tensor advantages, Tensor token_weights, "
      "Tensor? old_logprobs, Tensor? ref_logprobs, Tensor? multiplier, Tensor? phi, int loss_type, float epsilon_low, "
      "float epsilon_high, float delta, float beta, bool bias_correct_kl, float sapo_temperature_pos, "
      "float sapo_temperature_neg, Tensor(d!) grad, Tensor(e!) at_target, Tensor(f!) row_factors, Tensor(g!) scratch) -> ()");
  m.def(
      "fused_grad(Tensor hidden, Tensor weight, Tensor targets, float temperature, float logit_scale, float? softcap, "
      "Tensor logprobs, Tensor lse, Tensor? entropy, Tensor? grad_logprobs, Tensor? grad_entropy, Tensor(a!) grad, "
      "Tensor(b!) at_target) -> ()");
  m.def(
      "finish_hidden_grad(Tensor(a!) out, Tensor? factors, Tensor at_target, Tensor targets, Tensor weight, float scale) -> ()");
  m.def("add_to_targets(Tensor(a!) total, Tensor at_target, Tensor targets, Tensor hidden, float scale) -> ()");
  m.def("take_targets(Tensor values, Tensor targets, Tensor(a!) out) -> ()");
  m.def("round_at_targets(Tensor(a!) total, Tensor sums, Tensor at_target, Tensor targets, Tensor hidden, float scale) -> ()");
  m.def("scale_rows(Tensor hidden, Tensor factors, Tensor(a!) out) -> ()");
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
  m.def("swiglu(Tensor gate, Tensor up, Tensor(a!) product) -> ()");
  m.def(
      "swiglu_grad(Tensor gate, Tensor up, Tensor grad, Tensor(a!) grad_gate, Tensor(b!) grad_up, Tensor(c!)? product) "
      "-> ()");
  m.def("left_pack_into(Tensor mask, Tensor(a!) index, Tensor(b!) counts) -> ()");
  m.def("take_rows_into(Tensor values, Tensor rows, int pattern, Tensor(a!) out) -> ()");
  m.def("sum_rows_into(Tensor grads, Tensor order, Tensor start, Tensor(a!) out) -> ()");
  m.def(
      "compact_rows(Tensor targets, int vocabulary, Tensor? first, Tensor? second, Tensor(a!) wanted, Tensor(b!)? others, "
      "Tensor(c!) counts) -> ()");
  m.def(
      "grpo_rows(Tensor segments, Tensor targets, int vocabulary, Tensor? mask, Tensor advantages, Tensor? sampler_ratio, "
      "int normaliser, float factor, float accumulation, Tensor? items, float items_factor, float entropy_coef, "
      "float k_pos, float lambda_pos, float k_neg, float lambda_neg, bool by_advantage, Tensor(a!) counted_targets, "
      "Tensor(b!) wanted, Tensor(c!) others, Tensor(d!) row_advantages, Tensor(e!) weights, Tensor(f!)? multiplier, "
      "Tensor(g!)? phi, Tensor(h!)? entropy_weights, Tensor(i!)? phi_of_sequence, Tensor(j!) sizes, "
      "Tensor(k!) counts) -> ()");
  m.def(
      "grpo_sums(Tensor? segments, Tensor counted_targets, Tensor logprobs, Tensor advantages, Tensor weights, "
      "Tensor? entropy, Tensor? old_logprobs, Tensor? ref_logprobs, Tensor? multiplier, Tensor? phi, "
      "Tensor? entropy_weights, Tensor? sequence_advantages, Tensor? phi_of_sequence, int loss_type, float epsilon_low, "
      "float epsilon_high, float delta, float beta, bool bias_correct_kl, float sapo_temperature_pos, "
      "float sapo_temperature_neg, float policy_scale, bool sequence_level, Tensor(a!) partials, Tensor(b!) sums, "
      "Tensor(c!) clips) -> ()");
}

// For every device, so that a tensor on the wrong one meets the checks above.
STABLE_TORCH_LIBRARY_IMPL(fastgrpo, CompositeExplicitAutograd, m) {
  m.impl("row_pass", TORCH_BOX(&fastgrpo::row_pass));
  m.impl("row_objective", TORCH_BOX(&fastgrpo::row_objective));
  m.impl("row_grad", TORCH_BOX(&fastgrpo::row_grad));
  m.impl("fused_pass", TORCH_BOX(&fastgrpo::fused_pass));
  m.impl("fused_objective", TORCH_BOX(&fastgrpo::fused_objective));
  m.impl("fused_grad", TORCH_BOX(&fastgrpo::fused_grad));
  m.impl("finish_hidden_grad", TORCH_BOX(&fastgrpo::finish_hidden_grad));
  m.impl("add_to_targets", TORCH_BOX(&fastgrpo::add_to_targets));
  m.impl("take_targets", TORCH_BOX(&fastgrpo::take_targets));
  m.impl("round_at_targets", TORCH_BOX(&fastgrpo::round_at_targets));
  m.impl("scale_rows", TORCH_BOX(&fastgrpo::scale_rows));
  m.impl("scale_round", TORCH_BOX(&fastgrpo::scale_round));
  m.impl("weigh_slopes", TORCH_BOX(&fastgrpo::weigh_slopes));
  m.impl("merge_attention", TORCH_BOX(&fastgrpo::merge_attention));
  m.impl("rotary", TORCH_BOX(&fastgrpo::rotary));
  m.impl("swiglu", TORCH_BOX(&fastgrpo::swiglu));
  m.impl("swiglu_grad", TORCH_BOX(&fastgrpo::swiglu_grad));
  m.impl("left_pack_into", TORCH_BOX(&fastgrpo::left_pack));
  m.impl("take_rows_into", TORCH_BOX(&fastgrpo::take_rows));
  m.impl("sum_rows_into", TORCH_BOX(&fastgrpo::sum_rows));
  m.impl("compact_rows", TORCH_BOX(&fastgrpo::compact_rows));
  m.impl("grpo_rows", TORCH_BOX(&fastgrpo::grpo_rows));
  m.impl("grpo_sums", TORCH_BOX(&fastgrpo::grpo_sums));
}
