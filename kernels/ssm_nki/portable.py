"""The part of NKI that every release from 0.2.0 (Neuron SDK 2.28) to 0.6.0 (SDK 2.32) has, by name and by parameter.

Made from the stub files of these releases: a function is here if all of them have it, a parameter if all take it.
tests/kernels/test_lint.py compares this table with the listing that it was made from, where that is at hand.
"""

RELEASES = ("0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0")

# nki.isa: "required parameters | optional parameters". Not listed: what the simulator does not have.
_ISA = {
    "activation": "dst op data | bias scale reduce_op reduce_res reduce_cmd",
    "activation_reduce": "dst op data reduce_op reduce_res | bias scale",
    "affine_select": "dst pattern offset channel_multiplier on_true_tile on_false_value | cmp_op",
    "bn_aggr": "dst data |",
    "bn_stats": "dst data |",
    "dma_copy": "dst src | oob_mode dge_mode",
    "iota": "dst pattern offset | channel_multiplier",
    "memset": "dst value | engine",
    "nc_matmul": "dst stationary moving | is_stationary_onezero is_moving_onezero is_transpose tile_position tile_size"
    " perf_mode",
    "nc_stream_shuffle": "dst src shuffle_mask |",
    "nc_transpose": "dst data | engine",
    "reciprocal": "dst data |",
    "scalar_tensor_tensor": "dst data op0 operand0 op1 operand1 | reverse0 reverse1",
    "select_reduce": "dst predicate on_true on_false | reduce_res reduce_cmd reduce_op reverse_pred",
    "tensor_copy": "dst src | engine",
    "tensor_copy_predicated": "dst src predicate | reverse_pred",
    "tensor_partition_reduce": "dst op data |",
    "tensor_reduce": "dst op data axis | negate keepdims",
    "tensor_scalar": "dst data op0 operand0 | reverse0 op1 operand1 reverse1 engine",
    "tensor_scalar_cumulative": "dst src op0 op1 imm0 | imm1 reduce_cmd",
    "tensor_scalar_reduce": "dst data op0 operand0 reduce_op reduce_res | reverse0",
    "tensor_tensor": "dst data1 data2 op | engine",
    "tensor_tensor_scan": "dst data0 data1 initial op0 op1 | reverse0 reverse1",
}
_WITHOUT_NAME = ("tensor_scalar_cumulative",)  # the one that takes no name= in some release


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _parameters(name: str, listed: str) -> tuple[frozenset[str], frozenset[str]]:
    required, optional = (_words(part) for part in listed.split("|"))
    return required, required | optional | (frozenset() if name in _WITHOUT_NAME else {"name"})


ISA = {name: _parameters(name, listed) for name, listed in _ISA.items()}  # name: (required, all parameters)
ISA_FUNCTIONS_WITHOUT_PARAMETERS = frozenset({"get_nc_version"})
ISA_CLASSES = {
    "engine": _words("tensor vector scalar gpsimd dma sync unknown"),
    "nc_version": _words("gen2 gen3 gen4"),
    "reduce_cmd": _words("idle reset reduce reset_reduce load_reduce"),
    "dge_mode": _words("unknown swdge hwdge none"),
    "oob_mode": _words("error skip"),
    "matmul_perf_mode": _words("none double_row"),
}
ISA_NAMES = _words("tensor_engine vector_engine scalar_engine gpsimd_engine unknown_engine")

# nki.language: what may be called, what may be named (data types, memories), and what may be given as op=.
# Left out on purpose: zeros (its buffer= does not work in 0.2.0) and the operators as functions.
LANGUAGE_FUNCTIONS = {
    "affine_range": frozenset({"start", "stop", "step"}),
    "device_print": frozenset({"print_prefix", "tensor"}),
    "ds": frozenset({"start", "size"}),
    "ndarray": frozenset({"shape", "dtype", "buffer", "name"}),
    "num_programs": frozenset({"axes"}),
    "program_id": frozenset({"axis"}),
    "static_range": frozenset({"start", "stop", "step"}),
}
LANGUAGE_NAMES = _words(
    "bfloat16 bool_ float16 float32 float8_e4m3 float8_e5m2 tfloat32 int8 int16 int32 uint8 uint16 uint32 "
    "hbm private_hbm psum sbuf shared_hbm NKIObject"
)
TILE_SIZE = _words("pmax gemm_stationary_fmax gemm_moving_fmax bn_stats_fmax")
OPERATORS = _words(
    "add subtract multiply maximum minimum equal not_equal greater_equal greater less_equal less "
    "logical_and logical_or logical_xor rsqrt reciprocal abs power "
    "invert bitwise_and bitwise_or bitwise_xor left_shift right_shift "
    "copy square sigmoid relu gelu gelu_dx gelu_apprx_tanh gelu_apprx_sigmoid gelu_apprx_sigmoid_dx silu silu_dx tanh "
    "softplus mish erf erf_dx exp sign log sin arctan sqrt"
)

# Tensors: attributes, and the methods with the parameters that may be named.
TENSOR_ATTRIBUTES = frozenset({"shape", "dtype", "buffer", "name"})
TENSOR_METHODS = {"reshape": frozenset({"shape"}), "ap": frozenset({"pattern", "offset"})}

# Python, as the compiler's public front end (KLR, March 2026) reads and evaluates it.
STATEMENTS = _words("AnnAssign Assert Assign AugAssign Break Continue Expr For If Pass Return While")
EXPRESSIONS = _words(
    "Attribute BinOp BoolOp Call Compare Constant Dict FormattedValue IfExp JoinedStr List Name Slice Subscript Tuple "
    "UnaryOp"
)
BUILTINS = _words("abs bool dict divmod float int isinstance len list max min print range slice str tuple type")
CONTAINER_METHODS = _words(
    "append clear copy count extend get index items keys pop remove reverse setdefault sort values"
)
