"""The program that a policy wrote: what it was asked for, the check of what it answered, and what was mended.

Two forms are read: the body of `async def __call__(self, problem, entry_point)`, which the prompt asks for,
and AFlow's whole `class Workflow`. Checks look at the syntax tree alone; nothing of the program is executed.
Each mend and each check is one function over a `Reading`. Variables that may be unbound are not looked for.
"""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gradeflow import params, prompt
from gradeflow.prompt import Message
from gradeflow.types import Example
from gradeflow.workflow.operators import OPERATORS, Operator, describe, unfence

Form = Literal["body", "class"]
FailureClass = Literal["syntax", "contract", "operator", "await", "arguments", "import"]

ALLOWED_IMPORTS = frozenset(
    {"asyncio", "collections", "datetime", "decimal", "fractions", "functools", "itertools", "json", "math"}
    | {"random", "re", "statistics", "string", "typing"}
)
_OPERATOR_MODULE = re.compile(r"workspace\.\w+\.workflows\.template\.operator")
_AFLOW_MODULES = frozenset({"scripts.async_llm", "scripts.evaluator"})
_BY_FOLDED_NAME = {name.lower(): operator for name, operator in OPERATORS.items()}
_METHOD = "async def __call__(self, problem, entry_point): pass"
_COST = ', self.llm.get_usage_summary()["total_cost"]'
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_USES = (ast.Expr, ast.Subscript, ast.Attribute, ast.BinOp, ast.Compare, ast.FormattedValue)
_SINGLE_CALLS = frozenset({"str", "int", "float", "len", "round", "repr"})
_TEXT_METHODS = frozenset({"strip", "lstrip", "rstrip", "lower", "upper", "title", "join", "replace", "format"})
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


@dataclass(frozen=True, slots=True)
class Program:
    """A program that passed every check; `source` is its text after the mends."""

    source: str
    form: Form
    mends: tuple[str, ...] = ()


class ProgramError(Exception):
    """The policy's program is refused. This is data about the policy, not a fault of ours."""

    def __init__(self, failure: FailureClass, reason: str) -> None:
        super().__init__(reason)
        self.failure: FailureClass = failure
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Reading:
    """A program's syntax tree and what mends and checks ask of it; the body form stands inside its method.

    `modules` are the program's names for AFlow's operator module, `attributes` what `self` has (None where a
    base class hides it), `instances` the operators by the name under which they are called: `self.custom`.
    """

    source: str
    form: Form
    tree: ast.Module
    method: ast.stmt | None
    offered: Collection[str]
    nodes: tuple[ast.AST, ...]
    parents: Mapping[ast.AST, ast.AST]
    modules: Collection[str]
    attributes: Collection[str] | None
    instances: Mapping[str, Operator]

    def calls(self) -> Iterator[tuple[ast.Call, Operator]]:
        for node in self.nodes:
            if isinstance(node, ast.Call) and (operator := self.instances.get(_dotted(node.func))):
                yield node, operator

    def returns(self) -> Iterator[ast.Return]:
        """The method's own returns, without those of functions inside it."""
        waiting: list[ast.AST] = list(self.method.body) if isinstance(self.method, ast.AsyncFunctionDef) else []
        for node in waiting:
            if isinstance(node, ast.Return):
                yield node
            elif not isinstance(node, _SCOPES):
                waiting.extend(ast.iter_child_nodes(node))


@dataclass(frozen=True, slots=True)
class Edit:
    """`new` in place of `old`, which ends at this line and byte."""

    line: int
    end: int
    old: str
    new: str


def policy_messages(example: Example, settings: params.Workflow) -> list[Message]:
    """What the policy reads: the problem and the operators, and nothing of the example's `extra`."""
    asked = prompt.load("policy")
    return prompt.user(asked.render(operators=describe(settings.operators), problem=example.problem))


def parse(completion: str, offered: Collection[str] = tuple(OPERATORS)) -> Program:
    """Read, mend and check what a policy wrote; it may use the `offered` operators alone.

    Raises:
        ProgramError: with the class of what is wrong, and the reason.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reading = _read(completion, offered)
        mends = []
        for name, mend in MENDS.items():
            if edits := list(mend(reading)):
                reading = _read(_edited(reading.source, edits), offered)
                mends.append(name)
        for check in CHECKS:
            check(reading)
    return Program(reading.source, reading.form, tuple(mends))


def _read(completion: str, offered: Collection[str]) -> Reading:
    source, tree = _source_and_tree(completion)
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and statement.name == "Workflow":
            return _read_class(source, tree, statement, offered)
    return _read_body(source, tree, offered)


def _read_body(source: str, written: ast.Module, offered: Collection[str]) -> Reading:
    tree = ast.parse(_METHOD)
    method = tree.body[0]
    assert isinstance(method, ast.AsyncFunctionDef)
    method.body = written.body or method.body
    nodes, parents = _family(tree)
    set_here = _set_on_self(nodes)
    offers = {f"self.{OPERATORS[name].attribute}": OPERATORS[name] for name in offered}
    instances = {name: operator for name, operator in offers.items() if name not in set_here}
    attributes = {"self.llm", *offers, *set_here}
    modules = _operator_modules(nodes)
    return Reading(source, "body", tree, method, offered, nodes, parents, modules, attributes, instances)


def _read_class(source: str, tree: ast.Module, workflow: ast.ClassDef, offered: Collection[str]) -> Reading:
    methods = {m.name: m for m in workflow.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)}
    nodes, parents = _family(tree)
    set_here = _set_on_self(nodes)
    modules = _operator_modules(nodes)
    instances = _instances(nodes, modules, set_here)
    members = {f"self.{name.id}" for part in workflow.body for name in ast.walk(part) if isinstance(name, ast.Name)}
    attributes = None if workflow.bases else {*set_here, *members, *(f"self.{name}" for name in methods)}
    method = methods.get("__call__")
    return Reading(source, "class", tree, method, offered, nodes, parents, modules, attributes, instances)


def _source_and_tree(completion: str) -> tuple[str, ast.Module]:
    text = completion.replace("\r\n", "\n").replace("\r", "\n")
    refusal = ""
    for plain in (text, unfence(text)) if "```" in text else (text,):
        for number, layout in enumerate(_layouts(plain)):
            try:
                return layout, ast.parse(layout)
            except _UNREADABLE as error:
                refusal = _said(error) if number == 0 else refusal
    raise ProgramError("syntax", refusal)


def _layouts(text: str) -> Iterator[str]:
    """The text; where it starts indented, without that too, and as a block, which keeps its strings."""
    yield text
    if text[:1].isspace():
        yield text.strip()
        yield f"if True:\n{text}"


def _said(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})"
    return f"{type(error).__name__}: {error}"


def _family(tree: ast.Module) -> tuple[tuple[ast.AST, ...], dict[ast.AST, ast.AST]]:
    nodes: list[ast.AST] = [tree]
    parents: dict[ast.AST, ast.AST] = {}
    for node in nodes:
        for child in ast.iter_child_nodes(node):
            parents[child] = node
            nodes.append(child)
    return tuple(nodes), parents


def _dotted(node: ast.AST) -> str:
    """`self.custom` for that expression, `x` for a name, and nothing for what is more than that."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def _set_on_self(nodes: Collection[ast.AST]) -> Mapping[str, int]:
    """The attributes that the program sets on `self`, with how often."""
    stores = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return Counter(name for node in stores if (name := _dotted(node)).startswith("self."))


def _folded(name: str) -> str:
    owner, dot, leaf = name.rpartition(".")
    return f"{owner}{dot}{leaf.replace('_', '').lower()}"


def _operator_modules(nodes: Collection[ast.AST]) -> set[str]:
    return {
        bound
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for imported, bound in _imported(node)
        if _OPERATOR_MODULE.fullmatch(imported)
    }


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """What is imported, by its full name, and the name that it gets."""
    above = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        yield f"{above}{alias.name}", alias.asname or alias.name


def _instances(
    nodes: Collection[ast.AST], modules: Collection[str], set_here: Mapping[str, int]
) -> dict[str, Operator]:
    """Operators that are made once and kept on `self`."""
    kept: dict[str, Operator] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            module, _, name = _folded(_dotted(node.value.func)).rpartition(".")
            if module in modules and name in _BY_FOLDED_NAME:
                kept |= {_dotted(target): _BY_FOLDED_NAME[name] for target in node.targets}
    return {name: operator for name, operator in kept.items() if set_here.get(name) == 1}


def _edited(source: str, edits: Collection[Edit]) -> str:
    lines = source.encode().split(b"\n")
    for edit in sorted(edits, key=lambda edit: (edit.line, edit.end), reverse=True):
        line = lines[edit.line - 1]
        start = edit.end - len(edit.old.encode())
        lines[edit.line - 1] = line[:start] + edit.new.encode() + line[edit.end :]
    return b"\n".join(lines).decode()


def _edit(reading: Reading, node: ast.expr, old: str, new: str) -> Iterator[Edit]:
    """Nothing where the tree's positions do not fit the text, as inside f-strings."""
    line, end = node.end_lineno or 0, node.end_col_offset or 0
    if reading.source.split("\n")[line - 1].encode()[:end].endswith(old.encode()):
        yield Edit(line, end, old, new)


def mend_operator_case(reading: Reading) -> Iterator[Edit]:
    """`self.Programmer` is `self.programmer`, and `operator.programmer` is `operator.Programmer`."""
    right = {_folded(name): name for name in (*reading.instances, *_members(reading.modules, OPERATORS))}
    known = {*right.values(), *(reading.attributes or right.values())}
    for node in reading.nodes:
        name = _dotted(node)
        if isinstance(node, ast.Attribute) and name not in known and (better := right.get(_folded(name))):
            yield from _edit(reading, node, node.attr, better.rpartition(".")[2])


def mend_missing_cost(reading: Reading) -> Iterator[Edit]:
    """`return answer` gets the cost as its second part, where the answer alone cannot be a pair already."""
    if "self.llm" in (reading.attributes or ()):
        for node in reading.returns():
            if node.value is not None and _is_single(node.value, reading, frozenset()):
                yield from _edit(reading, node.value, "", _COST)


def check_compiles(reading: Reading) -> None:
    """What the parser lets pass and the compiler does not, such as `await` in a plain function."""
    try:
        compile(reading.tree, "workflow", "exec")
    except _UNREADABLE as error:
        raise ProgramError("syntax", _said(error)) from None


def check_imports(reading: Reading) -> None:
    for node in reading.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for imported, _ in _imported(node):
                if not _may_be_imported(imported):
                    raise ProgramError("import", f"{imported} may not be imported (line {node.lineno})")


def check_contract(reading: Reading) -> None:
    method = reading.method
    if not isinstance(method, ast.AsyncFunctionDef):
        raise ProgramError("contract", "class Workflow has no `async def __call__`")
    required = len(method.args.posonlyargs + method.args.args) - len(method.args.defaults)
    if required > 3 or None in method.args.kw_defaults:
        raise ProgramError("contract", "__call__ gets problem and entry_point, and asks for more")
    values = [node.value for node in reading.returns() if node.value is not None]
    if not values:
        raise ProgramError("contract", "no `return answer, cost`")
    for value in values:
        if isinstance(value, ast.Tuple) and len(value.elts) != 2 and not _has_star(value.elts):
            raise ProgramError("contract", f"returns {len(value.elts)} values, not 2 (line {value.lineno})")


def check_operators(reading: Reading) -> None:
    offered = _members(reading.modules, reading.offered)
    for node in reading.nodes:
        if isinstance(node, ast.Attribute) and (name := _dotted(node)):
            owner = name.partition(".")[0]
            parent = reading.parents[node]
            called = isinstance(parent, ast.Call) and parent.func is node
            missing = called and reading.attributes is not None and name not in reading.attributes
            if (owner == "self" and missing) or (owner in reading.modules and name not in offered):
                raise ProgramError("operator", f"{name}: no such operator (line {node.lineno})")


def check_awaits(reading: Reading) -> None:
    """A call may be kept for a later `await`, if the program has one that awaits more than a call."""
    calls = dict(reading.calls())
    later = any(isinstance(node, ast.Await) and node.value not in calls for node in reading.nodes)
    for call, operator in calls.items():
        parent = reading.parents[call]
        kept = later and not isinstance(parent, _USES) and not _is_opened(parent, reading)
        if not isinstance(parent, ast.Await) and not kept:
            raise ProgramError("await", f"{operator.name} is not awaited (line {call.lineno})")


def check_arguments(reading: Reading) -> None:
    for call, operator in reading.calls():
        names = [keyword.arg for keyword in call.keywords]
        if None in names or _has_star(call.args):
            continue
        if len(call.args) > len(operator.parameters):
            raise ProgramError("arguments", f"{operator.name} takes {len(operator.parameters)} arguments")
        given = [*operator.parameters[: len(call.args)], *(name for name in names if name)]
        if reason := operator.unfit(given):
            raise ProgramError("arguments", f"{reason} (line {call.lineno})")


MENDS: dict[str, Callable[[Reading], Iterator[Edit]]] = {
    "operator_case": mend_operator_case,
    "missing_cost": mend_missing_cost,
}
CHECKS: tuple[Callable[[Reading], None], ...] = (
    check_compiles,
    check_imports,
    check_contract,
    check_operators,
    check_awaits,
    check_arguments,
)


def _members(modules: Collection[str], names: Collection[str]) -> set[str]:
    return {f"{module}.{name}" for module in modules for name in names}


def _is_opened(statement: ast.AST, reading: Reading) -> bool:
    """Whether a name is assigned here whose parts are used, and never the whole."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            loads = (n for n in reading.nodes if isinstance(n, ast.Name) and n.id == name)
            uses = [reading.parents[node] for node in loads if isinstance(node.ctx, ast.Load)]
            return all(isinstance(use, ast.Subscript | ast.Attribute) for use in uses)
    return False


def _may_be_imported(name: str) -> bool:
    root, module = name.partition(".")[0], name.rpartition(".")[0]
    known = root in ALLOWED_IMPORTS or not _AFLOW_MODULES.isdisjoint((name, module))
    return known or any(map(_OPERATOR_MODULE.fullmatch, (name, module)))


def _has_star(parts: Collection[ast.expr]) -> bool:
    return any(isinstance(part, ast.Starred) for part in parts)


def _is_single(node: ast.expr, reading: Reading, seen: frozenset[str]) -> bool:
    """Whether this is one value for sure, and not a pair. `seen` are the names on the way here."""
    match node:
        case ast.Constant(value=str() | int() | float()) | ast.JoinedStr():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _SINGLE_CALLS
        case ast.Call(func=ast.Attribute(attr=name, value=owner)):
            return name in _TEXT_METHODS and _dotted(owner) != "self"
        case ast.Subscript(value=base, slice=ast.Constant(value=str())):
            return _is_result(base, reading)
        case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
            return _is_single(left, reading, seen) and _is_single(right, reading, seen)
        case ast.Name(id=name) if name not in seen:
            values = _values_of(name, reading)
            known = bool(values) or name in {"problem", "entry_point"}
            return known and all(value and _is_single(value, reading, seen | {name}) for value in values)
        case ast.Name():
            return True
    return False


def _is_result(node: ast.expr, reading: Reading) -> bool:
    """Whether this is what an operator returned."""
    if isinstance(node, ast.Name):
        values = _values_of(node.id, reading)
        return bool(values) and all(isinstance(v, ast.Await) and _is_result(v, reading) for v in values)
    called = node.value if isinstance(node, ast.Await) else None
    return isinstance(called, ast.Call) and _dotted(called.func) in reading.instances


def _values_of(name: str, reading: Reading) -> list[ast.expr | None]:
    """What is assigned to a name, anywhere; None for a value that is not plain to see."""
    values: list[ast.expr | None] = []
    for node in reading.nodes:
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            parent = reading.parents[node]
            plain = parent if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign) else None
            values.append(plain.value if plain else None)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name == name:
            values.append(None)
    return values
