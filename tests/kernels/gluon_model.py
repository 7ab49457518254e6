"""Runs a warp-specialized Gluon kernel on the CPU: its own source, with torch in the place of Gluon.

Triton's interpreter does not know Gluon. Here every partition is a thread, of which one runs at a time: whom a
generator chooses, at every use of a barrier, copy, matmul or shared memory. Copies end and matmuls read when it
chooses, too, as late as they may, so that what may be overwritten or read too early is, in some order. The kernel's
arithmetic, masks and places in memory are its own; layouts of registers are not looked at, and of shared memory only
that a tile lies as panels of 128 bytes. Past a tensor's end TMA brings NaN here, on which no kernel is to depend.

A run also gives the trace of every partition: its waits, arrivals, copies, and what it reads and writes. From these
`check_order` tells whether every other order does the same. Not looked at are the threads of a partition: an arrival is
taken to follow a barrier of all of them, which Triton puts before each. Nor is what programs and partitions do to
memory outside, nor what the compiler makes of registers.
"""

import ast
import importlib
import inspect
import random
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, combinations, product
from pathlib import Path
from types import SimpleNamespace

import torch

_PANEL_BYTES = 128  # a swizzle's width
_ONE_BYTE = (torch.float8_e4m3fn,)  # which torch cannot index


class Stuck(AssertionError):
    """All partitions wait."""


class Race(AssertionError):
    """Memory is written while another uses it, or read before what is to be read was written."""


def _flat(tensor):
    """What lies from a tensor's first element on."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((length,), (1,))


def _of_nan(size, kind):
    return torch.full((size,), torch.nan).to(kind)


class Pointer:
    """An address of elements of a flat tensor, or a tensor of addresses."""

    def __init__(self, storage, at=0):
        self.storage, self.at = storage, at
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, other):
        return Pointer(self.storage, self.at + other)

    def places(self, mask):
        at = torch.as_tensor(self.at).long()
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(True if mask is None else mask))
        used = at[mask]
        inside = used.numel() == 0 or (int(used.min()) >= 0 and int(used.max()) < self.storage.numel())
        assert inside, "beyond a tensor"
        return at, mask


class Box:
    """A descriptor of TMA."""

    def __init__(self, described):
        self.rows = described.base.as_strided(described.shape, described.strides)
        self.shape, self.dtype = list(described.block_shape), described.base.dtype

    def part(self, row, column):
        part = _of_nan(self.shape[0] * self.shape[1], self.dtype).view(self.shape)
        assert row >= 0 and column >= 0 and column + self.shape[1] <= self.rows.shape[1], "beyond a tensor"
        found = self.rows[row : row + self.shape[0], column : column + self.shape[1]]
        part[: len(found)] = found
        return part


class Shared:
    """A part of an allocation: a tile of columns by panels, or a vector."""

    def __init__(self, machine, which, storage, at, shape, turned=False):
        self.machine, self.which, self.storage, self.at, self.shape = machine, which, storage, at, list(shape)
        self.turned, self.dtype = turned, storage.dtype

    def index(self, index):
        size = torch.Size(self.shape[1:]).numel()
        assert 0 <= int(index) < self.shape[0], "beyond an allocation"
        return Shared(self.machine, self.which, self.storage, self.at + int(index) * size, self.shape[1:])

    def permute(self, order):
        assert tuple(order) == (1, 0)
        return Shared(self.machine, self.which, self.storage, self.at, self.shape, not self.turned)

    def _reinterpret(self, kind, shape, _layout):
        assert kind == self.dtype
        assert torch.Size(shape).numel() == torch.Size(self.shape).numel()
        return Shared(self.machine, self.which, self.storage, self.at, shape)

    @property
    def span(self):
        return self.which, self.at, self.at + torch.Size(self.shape).numel()

    def read(self):
        flat = self.storage[self.at : self.span[2]]
        if len(self.shape) == 1:
            return flat.clone()
        rows, columns = self.shape
        panel = min(columns, _PANEL_BYTES // self.dtype.itemsize)
        tile = flat.view(columns // panel, rows, panel).permute(1, 0, 2).reshape(rows, columns)
        return tile.T if self.turned else tile

    def write(self, value):
        assert list(value.shape) == self.shape, "another shape"
        if len(self.shape) == 2:
            rows, columns = self.shape
            panel = min(columns, _PANEL_BYTES // self.dtype.itemsize)
            value = value.reshape(rows, columns // panel, panel).permute(1, 0, 2)
        self.storage[self.at : self.span[2]] = value.reshape(-1).to(self.dtype)

    def load(self, _layout):
        self.machine.step(("read", self.span))
        return self.read().clone()

    def store(self, value):
        assert not self.turned
        self.machine.step(("write", self.span))
        self.write(value)


@dataclass
class Barrier:
    """Of so many arrivals a phase, and bytes."""

    name: int
    count: int = 0
    phase: int = 0
    arrived: int = 0
    missing: int = 0

    def arrive(self):
        self.arrived += 1
        if self.arrived > self.count:
            raise Race(f"one arrival too many at {self}")

    def turn(self):
        if self.arrived == self.count and self.missing == 0:
            self.phase, self.arrived = self.phase + 1, 0


class Barriers(list):
    """An allocation of barriers."""

    def index(self, index):
        return self[int(index)]

    @property
    def shape(self):
        return [len(self), 1]


class _Pending:
    """A matmul that has been issued, and reads when it is waited for or sooner."""

    def __init__(self, left, right, before, is_early):
        self.left, self.right, self.before = left, right, before
        self.early = self.made() if is_early else None

    def made(self):
        before = self.before.value() if isinstance(self.before, _Pending) else self.before
        left = self.left.read() if isinstance(self.left, Shared) else self.left
        return left.float() @ self.right.read().float() + (0 if before is None else before)

    def value(self):
        return self.made() if self.early is None else self.early

    @classmethod
    def __torch_function__(cls, function, _kinds, _arguments=(), _named=None):
        raise Race(f"{function.__name__} of a matmul that may not have ended")


def _to(value, kind, bitcast=False):
    value = torch.as_tensor(value)
    return value.view(kind) if bitcast else value.to(kind)


def _assembly(text, _registers, given, **_named):
    """What is there for the compiler alone: a value, or a zero of which it does not know."""
    return given[0] * 0 if text == "and.b32 $0, $1, 0;" else given[0]


class _NewValues(ast.NodeTransformer):
    """`a += b` makes another value, and does not change one that has another name, too."""

    def visit_AugAssign(self, node):
        if not isinstance(node.target, ast.Name):
            return node
        left = ast.Name(node.target.id, ast.Load())
        return ast.copy_location(ast.Assign([node.target], ast.BinOp(left, node.op, node.value)), node)


@lru_cache(maxsize=64)
def _code_of(path, changes):
    """A file's code, and what it imports of other files here: their modules, and the names."""
    text = Path(path).read_text()
    for old, new in changes:
        text = text.replace(old, new)
    tree = ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    tree.body = [node for node in tree.body if node not in imports and getattr(node, "name", "") != "variants"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "to":
            node.func, node.args = ast.Name("_to", ast.Load()), [node.func.value, *node.args]
    tree = _NewValues().visit(tree)
    ours = [(node.module, [each.name for each in node.names]) for node in imports if node.module.startswith("baton.")]
    return compile(ast.fix_missing_locations(tree), str(path), "exec"), ours


@dataclass
class Machine:
    """A program of a grid: its memory, barriers and partitions."""

    place: tuple
    grid: tuple
    draw: random.Random
    changes: tuple = ()  # of sources: texts, and what stands for them
    spans: int = 0
    barriers: list = field(default_factory=list)
    copies: list = field(default_factory=list)
    traces: list = field(default_factory=list)
    changed: set = field(default_factory=set)
    current: int = -1

    # Of partitions.

    def step(self, what, ready=None):
        """Give way to others, note what happens next, and go on once it may."""
        if self.current >= 0:
            own = self.current
            self.waiting[own] = ready
            self.turn.release()
            self.turns[own].acquire()
            if self.failed:
                raise SystemExit
            self.traces[own].append(what)

    def specialize(self, partitions, _warps, _registers):
        self.turn = threading.Semaphore(0)
        self.turns = [threading.Semaphore(0) for _ in partitions]
        self.waiting = [None] * len(partitions)
        self.traces = [[] for _ in partitions]
        self.issued = [[] for _ in partitions]
        self.strewn, self.groups = [[] for _ in partitions], [[] for _ in partitions]
        self.failed, done, errors = False, [False] * len(partitions), []

        def run(which, function, arguments):
            self.turns[which].acquire()
            try:
                if not self.failed:
                    function(*arguments)
            except SystemExit:
                pass
            except BaseException as error:  # noqa: BLE001
                errors.append(error)
            done[which] = True
            self.turn.release()

        threads = [threading.Thread(target=run, args=(i, *each), daemon=True) for i, each in enumerate(partitions)]
        for thread in threads:
            thread.start()
        while not (all(done) and not self.copies) and not errors:
            able = [i for i in range(len(done)) if not done[i] and (self.waiting[i] is None or self.waiting[i]())]
            able += [-1] * bool(self.copies)
            if not able:
                errors.append(Stuck(str([trace[-1:] for trace in self.traces])))
                break
            which = self.draw.choice(able)
            if which < 0:
                self.end_copy(*self.copies.pop(self.draw.randrange(len(self.copies))))
                continue
            self.current, self.waiting[which] = which, None
            self.turns[which].release()
            self.turn.acquire()
        self.failed, self.current = True, -1
        for which, thread in enumerate(threads):
            self.turns[which].release()
            thread.join()
        if errors:
            raise errors[0]

    def end_copy(self, piece, value, barrier):
        piece.write(value() if callable(value) else value)
        if barrier is not None:
            barrier.missing -= torch.Size(piece.shape).numel() * piece.dtype.itemsize
            barrier.turn()

    # Of Gluon.

    def allocate(self, kind, shape, _layout):
        if kind == torch.int64:
            made = Barriers(Barrier(len(self.barriers) + index) for index in range(shape[0]))
            self.barriers += made
            return made if len(shape) == 2 else made[0]
        self.spans += 1
        return Shared(self, self.spans - 1, _of_nan(torch.Size(shape).numel(), kind), 0, shape)

    def init(self, barrier, count):
        barrier.count = count

    def wait(self, barrier, parity):
        parity = int(parity)
        assert parity in (0, 1) and barrier.count, "a barrier that was not made"
        self.step(["wait", barrier.name, parity], lambda: barrier.phase & 1 != parity)
        if self.current >= 0:
            self.traces[self.current][-1] = ("wait", barrier.name, parity, barrier.phase - 1)

    def arrive(self, barrier, count=1):
        assert count == 1
        self.step(("arrive", barrier.name))
        barrier.arrive()
        barrier.turn()

    def expect(self, barrier, num_bytes):
        self.step(("expect", barrier.name))
        barrier.missing += num_bytes
        barrier.arrive()

    def copy(self, box, place, barrier, piece):
        assert box.shape == piece.shape and box.dtype == piece.dtype and box.shape[1] * piece.dtype.itemsize == 128
        self.step(("copy", barrier.name, piece.span))
        row, column = map(int, place)
        self.copies.append((piece, lambda: box.part(row, column), barrier))

    def copy_plainly(self, piece, pointer, mask=None):
        """An asynchronous copy by threads, of the group that is committed next; zeros where there is nothing."""
        self.step(("strew", piece.span))
        self.strewn[self.current].append((piece, lambda: self.load(pointer, mask, 0.0), None))
        self.copies.append(self.strewn[self.current][-1])

    def commit(self):
        self.step(("commit",))
        self.groups[self.current].append(self.strewn[self.current])
        self.strewn[self.current] = []

    def collect(self, outstanding):
        """Wait for all groups of this partition but the last `outstanding`."""
        groups = self.groups[self.current]
        over = [id(copy) for group in groups[: len(groups) - outstanding] for copy in group]
        self.step(("collect", outstanding), lambda: not any(id(copy) in over for copy in self.copies))

    def multiply(self, left, right, before, use_acc=True, is_async=False):
        assert is_async
        spans = tuple(each.span for each in (left, right) if isinstance(each, Shared))
        self.step(("issue", spans))
        is_early = self.draw.random() < 0.3 and not isinstance(before, _Pending)
        pending = _Pending(left, right, before if use_acc else None, is_early)
        self.issued[self.current].append(pending)
        return pending

    def finish(self, outstanding, deps):
        self.step(("finish", outstanding))
        left_over = self.issued[self.current][-outstanding:] if outstanding else []
        self.issued[self.current] = left_over
        is_over = lambda each: isinstance(each, _Pending) and each not in left_over  # noqa: E731
        values = [each.value() if is_over(each) else each for each in deps]
        return values[0] if len(values) == 1 else tuple(values)

    def add(self, pointer, value, sem):
        """Atomically. A look that adds nothing may be early: it sees any number that was there since the launch."""
        assert sem == "acq_rel"
        before = pointer.storage[pointer.at].clone()
        if value == 0:
            return torch.tensor(self.draw.randint(0, int(before)), dtype=before.dtype)
        pointer.storage[pointer.at] += value
        return before

    def load(self, pointer, mask=None, other=torch.nan, cache_modifier=""):
        at, mask = pointer.places(mask)
        found = pointer.storage[torch.where(mask, at, 0)]
        return found if mask.all() else torch.where(mask, found, torch.tensor(other, dtype=found.dtype))

    def store(self, pointer, value, mask=None):
        at, mask = pointer.places(mask)
        storage, value = pointer.storage, torch.as_tensor(value).to(pointer.storage.dtype)
        if value.dtype in _ONE_BYTE:
            storage, value = storage.view(torch.uint8), value.view(torch.uint8)
        storage[at[mask]] = value.expand(at.shape)[mask]

    def names(self):
        """What a kernel's source finds in the place of Gluon."""
        any_layout = lambda *_args, **_named: None  # noqa: E731
        number = lambda value: torch.tensor(value, dtype=torch.int32)  # noqa: E731
        as_tensor = torch.as_tensor
        gl = SimpleNamespace(
            constexpr=lambda value: value, static_range=range, barrier=lambda: None, thread_barrier=lambda: None,
            NVMMADistributedLayout=any_layout, NVMMASharedLayout=any_layout, BlockedLayout=any_layout,
            SliceLayout=any_layout, DotOperandLayout=any_layout, SwizzledSharedLayout=any_layout,
            float32=torch.float32, int32=torch.int32, int64=torch.int64,
            program_id=lambda axis: number(self.place[axis]), num_programs=lambda axis: number(self.grid[axis]),
            arange=lambda first, end, _layout: torch.arange(first, end, dtype=torch.int32),
            zeros=lambda shape, kind, _layout: torch.zeros(shape, dtype=kind),
            full=lambda shape, value, kind, _layout: torch.full(shape, float(value), dtype=kind),
            convert_layout=lambda value, _layout: value,
            zeros_like=torch.zeros_like,
            where=lambda mask, a, b: torch.where(as_tensor(mask), a, b), atomic_add=self.add,
            exp=torch.exp, exp2=torch.exp2, log2=torch.log2, abs=torch.abs,
            fma=lambda a, b, c: a * b + c,
            maximum=lambda a, b: torch.maximum(as_tensor(a), as_tensor(b)),
            minimum=lambda a, b: torch.minimum(as_tensor(a), as_tensor(b)),
            max=lambda value, axis: torch.amax(value, dim=axis), sum=lambda value, axis: torch.sum(value, dim=axis),
            load=self.load, store=self.store, allocate_shared_memory=self.allocate, warp_specialize=self.specialize,
            inline_asm_elementwise=_assembly,
        )  # fmt: skip
        return {
            "gl": gl,
            "gluon": SimpleNamespace(jit=lambda function=None, **_: function or (lambda inner: inner)),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=any_layout, init=self.init, wait=self.wait, arrive=self.arrive, expect=self.expect
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self.copy_plainly, commit_group=self.commit, wait_group=self.collect
            ),
            "gdc_launch_dependents": lambda: None,
            "fence_async_shared": lambda: self.step(("fence",)),
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.finish,
            "_to": _to,
            "range": lambda *bounds: map(number, range(*map(int, bounds))),  # what it gives are tensors
        }  # fmt: skip

    def source(self, path):
        """What a file has, and what it imports of others that are in Gluon."""
        changes = tuple(change for change in self.changes if change[0] in Path(path).read_text())
        self.changed.update(changes)
        code, imports = _code_of(path, changes)
        found = self.names()
        for module, names in imports:
            made = importlib.import_module(module)
            there = self.source(made.__file__) if hasattr(made, "gluon") else vars(made)
            found |= {name: there[name] for name in names}
        exec(code, found)
        return found


class Model:
    """In the place of a kernel's launcher: programs one after another, in a drawn order; their machines are kept."""

    def __init__(self, kernel, seed=0, changes=()):
        """`changes` of sources: texts, and what stands for them."""
        self.path, self.name = inspect.getsourcefile(kernel.fn), kernel.fn.__name__
        self.arg_names, self.seed, self.changes, self.machines = kernel.arg_names, seed, tuple(changes), []

    def __call__(self, grid, arguments, constants):
        by_name = dict(constants.by_name)
        given = dict(zip(self.arg_names, map(_as_given, arguments), strict=False))
        given |= {name: by_name[name] for name in self.arg_names if name in by_name}
        places = list(product(*map(range, grid)))
        random.Random(self.seed).shuffle(places)
        for place in places:
            machine = Machine(place, grid, random.Random(f"{self.seed} {place}"), self.changes)
            self.machines.append(machine)
            kernel = machine.source(self.path)[self.name]
            assert machine.changed == set(self.changes), "a change of what is not there"
            kernel(**given)

    def check_order(self):
        """Of all programs; how many steps."""
        return sum(check_order(machine.traces, counts_of(machine)) for machine in self.machines)


def _as_given(argument):
    if isinstance(argument, torch.Tensor):
        return Pointer(_flat(argument))
    if isinstance(argument, int):
        return torch.tensor(argument, dtype=torch.int32)
    return argument if isinstance(argument, float) else Box(argument)


def counts_of(machine):
    """How many arrivals a phase of each barrier has."""
    return {barrier.name: barrier.count for barrier in machine.barriers}


def grouped(trace):
    """The copies of one phase of a barrier as one, begun where it expects them."""
    made, expecting = [], {}
    for what in trace:
        if what[0] == "expect":
            made.append(("copy", what[1], []))
            expecting[what[1]] = made[-1][2]
        elif what[0] == "copy":
            assert what[1] in expecting, "copies of a barrier follow what it expects"
            expecting[what[1]].append(what[2])
        else:
            made.append(what)
    return made


@dataclass(frozen=True)
class _Use:
    """Of shared memory. Fences are between what threads and what copies and matmuls do to it."""

    span: tuple
    begin: tuple
    end: tuple
    writes: bool
    by_threads: bool

    def meets(self, other):
        return self.span[0] == other.span[0] and self.span[1] < other.span[2] and other.span[1] < self.span[2]


def check_order(traces, counts):
    """Whether what one run did in some order, every run does, in any order of arrival; the number of steps.

    What happens before what follows from the traces: the steps of a partition, a copy's end after its issue, and a wait
    after what completes its phase. Uses of memory of which one writes must be so ordered, with a fence between if
    threads write and copies or matmuls use it then; and of every wait, that the phase before its own is over, and that
    the one after its own is not, or it would take one for another.

    Args:
        traces: of each partition.
        counts: arrivals of a phase, of each barrier.
    """
    order = _Order([grouped(trace) for trace in traces], counts)
    while order.left_over():
        if not any([order.advance(who) for who in range(len(traces))]):
            raise Stuck(str(order.left_over()))
    if any(order.reads):
        raise Race("matmuls without a wait")
    for node, barrier, phase in order.waits:
        following = order.phases[barrier, phase + 1]
        if len(following) == counts[barrier] and not any(order.surely(node, each) for each in following):
            raise Race(f"{node} may come when the next phase is over, too")
        if phase >= 1 and not order.is_over(barrier, phase - 1, node):
            raise Race(f"{node} may take the phase before for its own")
    by_memory = defaultdict(list)
    for use in order.uses:
        by_memory[use.span[0]].append(use)
    for first, then in (pair for uses in by_memory.values() for pair in combinations(uses, 2)):
        if first.meets(then) and (first.writes or then.writes) and first.begin != then.begin:
            order.check(first, then)
    return len(order.known)


class _Order:
    """What surely happened before each step of a run, whose traces it takes again."""

    def __init__(self, traces, counts):
        self.traces, self.counts = traces, counts
        self.at = [0] * len(traces)
        self.last = [0] * len(traces)  # what is known to have happened, as bits, after a partition's last step
        self.known, self.bits = {}, {}
        self.arrivals = defaultdict(list)  # of a barrier
        self.phases = defaultdict(list)  # what completes a barrier's phase
        self.uses, self.waits = [], []
        self.reads = [[] for _ in traces]  # of matmuls that were not waited for
        self.fences = [[] for _ in traces]
        self.strewn, self.groups = [[] for _ in traces], [[] for _ in traces]  # ends of copies by threads

    def left_over(self):
        return [trace[at] for trace, at in zip(self.traces, self.at, strict=True) if at < len(trace)]

    def surely(self, first, then):
        return first in self.bits and self.known[then] & self.bits[first]

    def is_over(self, barrier, phase, node):
        """Whether a phase is surely complete before a step."""
        ends = self.phases[barrier, phase]
        return len(ends) == self.counts[barrier] and all(self.surely(end, node) for end in ends)

    def check(self, first, then):
        if self.surely(then.end, first.begin):
            first, then = then, first
        elif not self.surely(first.end, then.begin):
            raise Race(f"{first} and {then}")
        if first.by_threads and first.writes and not then.by_threads:
            fences = self.fences[first.begin[0]]
            if not any(self.surely(first.end, fence) and self.surely(fence, then.begin) for fence in fences):
                raise Race(f"{first} and {then}, and no fence between")

    def happen(self, node, known):
        self.bits[node] = 1 << len(self.bits)
        self.known[node] = known | self.bits[node]
        return self.known[node]

    def advance(self, who):
        """Take a partition's next step, if it has one and need not wait."""
        if self.at[who] == len(self.traces[who]):
            return False
        what, node, known = self.traces[who][self.at[who]], (who, self.at[who]), self.last[who]
        if what[0] == "wait":
            if what[3] >= 0:  # else for the phase before the first
                ends = self.phases[what[1], what[3]]
                if len(ends) < self.counts[what[1]]:
                    return False
                for end in ends:
                    known |= self.known[end]
            self.waits.append((node, what[1], what[3]))
        elif what[0] == "collect":
            groups = self.groups[who]
            for end in chain.from_iterable(groups[: len(groups) - what[1]]):
                known |= self.known[end]
        self.last[who] = self.happen(node, known)
        self.at[who] += 1
        self.note(who, node, what)
        return True

    def note(self, who, node, what):
        """What a step that was taken begins, ends and uses."""
        if what[0] in ("arrive", "copy"):
            self.complete(node, what)
        elif what[0] == "issue":
            self.reads[who].append((what[1], node))
        elif what[0] == "finish":
            count = max(0, len(self.reads[who]) - what[1])
            over, self.reads[who] = self.reads[who][:count], self.reads[who][count:]
            self.uses += [_Use(span, begin, node, False, False) for spans, begin in over for span in spans]
        elif what[0] in ("read", "write"):
            self.uses.append(_Use(what[1], node, node, what[0] == "write", True))
        elif what[0] == "strew":
            end = (*node, "end")
            self.happen(end, self.known[node])
            self.strewn[who].append(end)
            self.uses.append(_Use(what[1], node, end, True, True))
        elif what[0] == "commit":
            self.groups[who].append(self.strewn[who])
            self.strewn[who] = []
        elif what[0] == "fence":
            self.fences[who].append(node)

    def complete(self, node, what):
        """A part of a phase of a barrier: an arrival, or the end of copies."""
        barrier, end = what[1], node
        phase = len(self.arrivals[barrier]) // self.counts[barrier]
        self.arrivals[barrier].append(node)
        if what[0] == "copy":
            end = (*node, "end")
            self.happen(end, self.known[node])
            self.uses += [_Use(span, node, end, True, False) for span in what[2]]
        if phase and not self.is_over(barrier, phase - 1, node):
            raise Race(f"{node} arrives in a phase that may not be over")
        self.phases[barrier, phase].append(end)
