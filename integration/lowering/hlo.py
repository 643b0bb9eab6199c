"""What a program of XLA for a GPU does, read from its optimized text.

One instruction of the text is one kernel. Its bytes are those of its operands
and results, each counted once: what the caches spare is not seen. A kernel of
Pallas is taken to read each operand once, which is how ours are written.
"""

import dataclasses
import math
import re

BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "f16": 16,
    "bf16": 16,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
    "f64": 64,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
}
ARRAY = re.compile(rf"\b({'|'.join(BITS)})\[([\d,]*)\]")
FLOAT8 = "__cublas$lt$matmul$f8"
TRITON_MATMUL = "a matmul by Triton"
MX_MATMUL = "a matmul by Triton with scales of blocks"
CODES = {"f8e4m3fn", "f8e5m2", "s8", "u8"}

# A Pallas kernel of this name returns at once if all scales are known: in a
# steady step it reads nothing but the flag.
SKIPPED = "float8_amax_if"

NO_KERNEL = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "add-dependency",
    "iota",
    "call",
    "while",
}


@dataclasses.dataclass
class Instruction:
    """A line of a computation."""

    name: str
    shape: str
    op: str
    operands: list[str]
    rest: str
    is_root: bool


@dataclasses.dataclass
class Kernel:
    """An instruction that runs.

    Attributes:
        kind: The operation, or the target of a custom call; `TRITON_MATMUL`
            or `MX_MATMUL` for a fusion with a matmul, which XLA writes in
            Triton.
        pallas: The name of a kernel of Pallas, or None.
        read: Bytes of its operands.
        written: Bytes of its results.
        flops: Of a matmul; 0 for all else.
        operand: The dtype of its first operand.
        result: The dtype of its first result.
        exact: Whether a matmul may not accumulate fast.
        scaled: Whether a call multiplies by a scalar that the program found.
        ops: The operations in it.
        times: How often it runs.
        text: Of the instruction, for a reader.
    """

    kind: str
    pallas: str | None
    read: float
    written: float
    flops: int
    operand: str
    result: str
    exact: bool
    scaled: bool
    ops: set[str]
    times: int
    text: str

    @property
    def bytes(self) -> float:
        """What it moves each time."""
        return self.read + self.written

    @property
    def moves_codes_alone(self) -> bool:
        """True if it transposes or copies one-byte numbers, and casts none."""
        one_byte = self.operand in CODES and self.result in CODES
        moves = self.ops & {"transpose", "copy"}
        return one_byte and bool(moves) and "convert" not in self.ops


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """Dtype and sizes of each array in a shape, which may be a tuple."""
    return [
        (dtype, [int(size) for size in sizes.split(",") if size])
        for dtype, sizes in ARRAY.findall(shape)
    ]


def size(dtype: str, sizes: list[int]) -> float:
    """Bytes of an array."""
    return math.prod(sizes) * BITS[dtype] / 8


def size_of(shape: str) -> float:
    """Bytes of all arrays in a shape."""
    return sum(size(*array) for array in arrays(shape))


def kernels(text: str) -> list[Kernel]:
    """The kernels of a program.

    Args:
        text: What `HloModule.to_string()` gives after optimization.
    """
    computations, entry = _computations(text)
    return _kernels(computations, entry, 1)


def rounded_scales(text: str) -> int:
    """How often a scalar, or what the three scalars of a state are, is cast.

    To bfloat16, as scales are written for XLA, which is to take them as they
    were before.
    """
    return len(re.findall(r"= bf16\[[13,]*\]\S* convert\(", text))


def _kernels(computations: dict, name: str, times: int) -> list[Kernel]:
    instructions = {each.name: each for each in computations[name]}
    found = []
    for each in instructions.values():
        called = _attribute(r"(?:calls|to_apply|body)=%?([\w.\-]+)", each.rest)
        if each.op in ("call", "while"):
            trips = _attribute(r'known_trip_count":\{"n":"(\d+)"', each.rest)
            found += _kernels(computations, called, times * int(trips or 1))
        elif each.op == "conditional":
            found += _branch(computations, each, times)
        elif each.op not in NO_KERNEL:
            inside = computations.get(called, []) if called else []
            fused = inside if each.op == "fusion" else []
            found.append(_kernel(each, instructions, fused, times))
    return found


def _branch(computations: dict, each: Instruction, times: int) -> list[Kernel]:
    """The branch of a conditional that moves less, and what decides.

    What a step does again and again: the other branch is for a first step.
    """
    names = re.findall(
        r"(?:_computation=|branch_computations=\{|, )%([\w.\-]+)", each.rest
    )
    branches = [
        _kernels(computations, name, times)
        for name in names
        if name in computations
    ]
    branch = min(branches, key=lambda kernels: sum(k.bytes for k in kernels))
    decision = Kernel(
        kind="conditional",
        pallas=None,
        read=0,
        written=0,
        flops=0,
        operand="",
        result="",
        exact=False,
        scaled=False,
        ops=set(),
        times=times,
        text=each.name,
    )
    return [decision, *branch]


def _kernel(
    each: Instruction,
    instructions: dict[str, Instruction],
    fused: list[Instruction],
    times: int,
) -> Kernel:
    kind = _attribute(r'custom_call_target="([^"]+)"', each.rest) or each.op
    pallas = None
    if kind == "__gpu$xla.gpu.triton":
        pallas = _attribute(r'\bname = "([^"]+)"', each.rest)
    read_from = [instructions[name] for name in each.operands]
    operands = [each.shape for each in read_from]
    results = arrays(each.shape)
    if kind.startswith("__cublas$lt$matmul"):
        # The last result of a call is the memory that cuBLASLt works in.
        results = results[:1]
    matmul, shapes = each, {name: i.shape for name, i in instructions.items()}
    for inner in fused:
        if inner.op in ("dot", "scaled-dot"):
            matmul, shapes = inner, {i.name: i.shape for i in fused}
            kind = TRITON_MATMUL if inner.op == "dot" else MX_MATMUL
    flops = _flops(matmul, shapes)
    written = sum(size(*array) for array in results)
    update = _updated(fused)
    read = sum(_read(i, shape, fused) for i, shape in enumerate(operands))
    if pallas == SKIPPED:
        read = 0
    return Kernel(
        kind=kind,
        pallas=pallas,
        read=read,
        written=written if update is None else update,
        flops=flops,
        operand=_dtype(shapes[matmul.operands[0]]) if matmul.operands else "",
        result=_dtype(each.shape),
        exact=bool(flops) and not _accumulates_fast(each.rest),
        scaled=any(
            i.shape.startswith("f32[]") and i.op != "constant"
            for i in read_from
        ),
        ops={inner.op for inner in fused} or {each.op},
        times=times,
        text=f"{pallas or each.name} {operands} -> {each.shape}",
    )


def _dtype(shape: str) -> str:
    found = arrays(shape)
    return found[0][0] if found else ""


def _flops(matmul: Instruction, shapes: dict[str, str]) -> int:
    """Of a call of cuBLASLt or a `dot`; 0 for any other instruction."""
    pattern = r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)[\]}]'
    summed = _attribute(pattern, matmul.rest)
    if summed is None:
        return 0
    sizes = arrays(shapes[matmul.operands[0]])[0][1]
    terms = math.prod(sizes[int(axis)] for axis in re.findall(r"\d+", summed))
    return 2 * terms * math.prod(arrays(matmul.shape)[0][1])


def _accumulates_fast(rest: str) -> bool:
    """Whether a matmul's precision lets a GPU sum up with fewer bits."""
    algorithm = _attribute(r'"algorithm":"(\w+)"', rest)
    if algorithm not in (None, "ALG_UNSET"):
        return algorithm.endswith("_FAST_ACCUM")
    return '"operand_precision":["HIGHEST","HIGHEST"]' not in rest


def _read(position: int, shape: str, fused: list[Instruction]) -> float:
    """Bytes that a kernel reads of an operand: of slices alone, those."""
    whole = size_of(shape)
    for inner in fused:
        if inner.op != "parameter" or not inner.rest.startswith(f"{position})"):
            continue
        users = [each for each in fused if inner.name in each.operands]
        if users and all("slice" in each.op for each in users):
            read = sum(
                0 if each.op == "dynamic-update-slice" else size_of(each.shape)
                for each in users
            )
            return min(whole, read)
    return whole


def _updated(fused: list[Instruction]) -> float | None:
    """Bytes that are written into a part of an operand, in place."""
    for inner in fused:
        if inner.is_root and inner.op == "dynamic-update-slice":
            shapes = {each.name: each.shape for each in fused}
            return size_of(shapes[inner.operands[1]])
    return None


def _attribute(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found and found[1]


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations by name, and which of them runs first."""
    found: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            name = header[2]
            found[name] = []
            entry = name if header[1] else entry
        elif line.startswith(" ") and name:
            instruction = _instruction(line)
            if instruction is not None:
                found[name].append(instruction)
    return found, entry


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    # The code of a Pallas kernel is text that only looks like attributes.
    rest = re.sub(r'\bir = "(?:[^"\\]|\\.)*"', "", line[head.end() :])
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    op, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    operands = re.findall(r"%([\w.\-]+)", rest[:end])
    return Instruction(head[2], shape, op, operands, rest, bool(head[1]))


def _closing(text: str) -> int:
    """Just after the parenthesis that closes the first one."""
    depth = 0
    for i, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return i + 1
    return len(text)
