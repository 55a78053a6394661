"""A program as its mends and checks see it: the syntax tree, and what is asked of it more than once."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from gradeflow.workflow.operators import OPERATORS, Operator, unfence
from gradeflow.workflow.program.flow import Unbound, find_unbound

Form = Literal["body", "class"]
FailureClass = Literal[
    "syntax", "contract", "operator", "await", "arguments", "import", "attribute", "name", "stdin", "unbound"
]
Kind = Literal["str", "number", "list", "dict", "set", "unknown"] | Operator
"""What a value is; an operator stands for what it returns."""

Method = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)

ALLOWED_IMPORTS = frozenset(
    {"asyncio", "collections", "datetime", "decimal", "fractions", "functools", "itertools", "json", "math"}
    | {"random", "re", "statistics", "string", "typing"}
)
OPERATOR_MODULE = re.compile(r"workspace\.\w+\.workflows\.template\.operator")
PROMPT_MODULE = re.compile(r"workspace\.\w+\.workflows\.round_\w+\.prompt")
AFLOW_MODULES = frozenset({"scripts.async_llm", "scripts.evaluator"})
_BY_FOLDED_NAME = {name.lower(): operator for name, operator in OPERATORS.items()}
_METHOD = "async def __call__(self, problem, entry_point): pass"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CALLS: Mapping[str, Kind] = {
    **dict.fromkeys(("str", "repr"), "str"),
    **dict.fromkeys(("int", "float", "len", "round"), "number"),
    **dict.fromkeys(("list", "sorted"), "list"),
    "dict": "dict",
    "set": "set",
}
_METHODS: Mapping[str, Kind] = {
    **dict.fromkeys(("strip", "lstrip", "rstrip", "lower", "upper", "title", "join", "replace", "format"), "str"),
    **dict.fromkeys(("split", "splitlines"), "list"),
    "get_usage_summary": "dict",
}
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


class ProgramError(Exception):
    """The policy's program is refused. This is data about the policy, not a fault of ours."""

    def __init__(self, failure: FailureClass, reason: str) -> None:
        super().__init__(reason)
        self.failure: FailureClass = failure
        self.reason = reason


@dataclass(frozen=True)
class Reading:
    """A program that compiles; the body form stands inside its method.

    `modules` are the program's names for AFlow's operator module, `attributes` what `self` has (None where that
    cannot be told), `instances` the operators by the name under which they are called: `self.custom`.
    """

    source: str
    form: Form
    tree: ast.Module
    workflow: ast.ClassDef | None
    method: ast.stmt | None
    offered: Collection[str]
    nodes: Mapping[type[ast.AST], list[ast.AST]]
    parents: Mapping[ast.AST, ast.AST]
    modules: Collection[str]
    attributes: Collection[str] | None
    instances: Mapping[str, Operator]

    def of(self, kind: type[Node]) -> list[Node]:
        return self.nodes.get(kind, [])  # type: ignore[return-value]  # they are kept by their type

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        return [*self.of(ast.Import), *self.of(ast.ImportFrom)]

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Each of the nodes around it, from within, and the part of that one which leads here."""
        while node in self.parents:
            yield self.parents[node], node
            node = self.parents[node]

    def calls(self) -> Iterator[tuple[ast.Call, Operator]]:
        for node in self.of(ast.Call):
            if operator := self.instances.get(dotted(node.func)):
                yield node, operator

    def returns(self) -> Iterator[ast.Return]:
        """The method's own returns, without those of functions inside it."""
        for node in self.of(ast.Return):
            if next(above for above, _ in self.above(node) if isinstance(above, _SCOPES)) is self.method:
                yield node

    @cached_property
    def unbound(self) -> list[Unbound]:
        parts = self.workflow.body if self.workflow else [self.method]
        entries = [part for part in parts if isinstance(part, Method) and part.name in {"__init__", "__call__"}]
        return find_unbound(self.tree, entries)

    @cached_property
    def stores(self) -> Mapping[str, list[ast.Name]]:
        stores = defaultdict(list)
        for node in self.of(ast.Name):
            if isinstance(node.ctx, ast.Store):
                stores[node.id].append(node)
        return stores

    @cached_property
    def parameters(self) -> Counter[str]:
        return Counter(argument.arg for argument in self.of(ast.arg))

    @cached_property
    def defined(self) -> Counter[str]:
        """How often a name is bound in another way than by assignment."""
        names = [bound for node in self.imports for _, bound in imported(node)]
        for kind in (
            ast.FunctionDef,
            ast.AsyncFunctionDef,
            ast.ClassDef,
            ast.MatchAs,
            ast.MatchStar,
            ast.ExceptHandler,
        ):
            names += [name for node in self.of(kind) if isinstance(name := getattr(node, "name", None), str)]
        return Counter(names)

    def values_of(self, name: str) -> list[ast.expr | None]:
        """What is assigned to a name, anywhere; None for a value that is not plain to see."""
        values: list[ast.expr | None] = []
        for node in self.stores.get(name, ()):
            parent = self.parents[node]
            plain = isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr)
            values.append(parent.value if plain else None)  # type: ignore[attr-defined]
        return values + [None] * self.defined[name]

    def kinds(self, node: ast.expr | None, seen: frozenset[str] = frozenset()) -> set[Kind]:  # noqa: PLR0912 - a table
        """What a value can be; `seen` are the names on the way here."""
        match node:
            case ast.Constant(value=str()) | ast.JoinedStr():
                return {"str"}
            case ast.Constant(value=int() | float()):
                return {"number"}
            case ast.List() | ast.ListComp():
                return {"list"}
            case ast.Dict() | ast.DictComp():
                return {"dict"}
            case ast.Set() | ast.SetComp():
                return {"set"}
            case ast.Call(func=ast.Name(id=name)) if name not in self.stores and name not in self.defined:
                kind: Kind = _CALLS.get(name, "unknown")
                return {kind}
            case ast.Call(func=ast.Attribute(attr=name, value=owner)):
                kind = "unknown" if dotted(owner) == "self" else _METHODS.get(name, "unknown")
                return {kind}
            case ast.Await(value=ast.Call(func=called)):
                return {self.instances.get(dotted(called), "unknown")}
            case ast.Subscript(value=base, slice=ast.Constant(value=str(key))):
                found = self.kinds(base, seen)
                known = found and all(isinstance(kind, Operator) and key in kind.returns for kind in found)
                return {"str"} if known else {"unknown"}
            case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
                return self.kinds(left, seen) | self.kinds(right, seen)
            case ast.Name(id=name) if name in seen:
                return set()
            case ast.Name(id=name):
                found = {kind for value in self.values_of(name) for kind in self.kinds(value, seen | {name})}
                own = name in {"problem", "entry_point"} and self._takes(name)
                if own:
                    found.add("str")
                if self.parameters[name] > own or not found:
                    found.add("unknown")
                return found
        return {"unknown"}

    def _takes(self, name: str) -> bool:
        method = self.method
        return isinstance(method, Method) and any(argument.arg == name for argument in method.args.args)

    def is_single(self, node: ast.expr) -> bool:
        """Whether this is one value for sure, and not a pair."""
        kinds = self.kinds(node)
        return bool(kinds) and kinds <= {"str", "number"}


def read(completion: str, offered: Collection[str]) -> Reading:
    """Raises ProgramError for what does not compile."""
    source, tree = _source_and_tree(completion)
    workflow = next((s for s in tree.body if isinstance(s, ast.ClassDef) and s.name == "Workflow"), None)
    if workflow is None:
        tree = _in_method(tree)
    try:
        compile(tree, "workflow", "exec")
    except _UNREADABLE as error:
        raise ProgramError("syntax", _said(error)) from None
    nodes, parents = _family(tree)
    attributes = nodes.get(ast.Attribute, [])
    stored = [node for node in attributes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    set_here = Counter(name for node in stored if (name := dotted(node)).startswith("self."))
    modules = set(_named(nodes, OPERATOR_MODULE))
    if workflow is None:
        offers = {f"self.{OPERATORS[name].attribute}": OPERATORS[name] for name in offered}
        given = {"self.llm", *offers}
        instances = {name: operator for name, operator in offers.items() if name not in set_here}
        method: ast.stmt | None = tree.body[0]
    else:
        given = set()
        instances = _instances(nodes, modules, set_here)
        methods = {part.name: part for part in workflow.body if isinstance(part, Method)}
        method = methods.get("__call__")
    has = {*given, *set_here, *_members(nodes)}
    form: Form = "class" if workflow else "body"
    hides = any(
        part.bases or part.decorator_list for part in nodes.get(ast.ClassDef, []) if isinstance(part, ast.ClassDef)
    )
    return Reading(
        source, form, tree, workflow, method, offered, nodes, parents, modules, None if hides else has, instances
    )


def _in_method(written: ast.Module) -> ast.Module:
    tree = ast.parse(_METHOD)
    method = tree.body[0]
    assert isinstance(method, ast.AsyncFunctionDef)
    method.body = written.body or method.body
    return tree


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


def _family(tree: ast.Module) -> tuple[dict[type[ast.AST], list[ast.AST]], dict[ast.AST, ast.AST]]:
    """The nodes by type, and each one's parent."""
    nodes: list[ast.AST] = [tree]
    parents: dict[ast.AST, ast.AST] = {}
    kept: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    for node in nodes:
        kept[type(node)].append(node)
        for value in vars(node).values():
            for part in value if type(value) is list else (value,):
                if isinstance(part, ast.AST) and not isinstance(part, ast.expr_context):
                    parents[part] = node
                    nodes.append(part)
    return kept, parents


def dotted(node: ast.AST) -> str:
    """`self.custom` for that expression, `x` for a name, and nothing for what is more than that."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def folded(name: str) -> str:
    owner, dot, leaf = name.rpartition(".")
    return f"{owner}{dot}{leaf.replace('_', '').lower()}"


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """What is imported, by its full name, and the name that it gets."""
    above = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        yield f"{above}{alias.name}", alias.asname or alias.name


def _named(nodes: Mapping[type[ast.AST], list[ast.AST]], module: re.Pattern[str]) -> Iterator[str]:
    """The program's names for a module."""
    for node in (*nodes.get(ast.Import, ()), *nodes.get(ast.ImportFrom, ())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (bound for name, bound in imported(node) if module.fullmatch(name))


def prompt_modules(reading: Reading) -> set[str]:
    return set(_named(reading.nodes, PROMPT_MODULE))


def _members(nodes: Mapping[type[ast.AST], list[ast.AST]]) -> Iterator[str]:
    """What the classes of the program define for their `self`."""
    for node in nodes.get(ast.ClassDef, ()):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, Method | ast.ClassDef):
                    yield f"self.{part.name}"
                else:
                    yield from (f"self.{name.id}" for name in ast.walk(part) if isinstance(name, ast.Name))


def _instances(
    nodes: Mapping[type[ast.AST], list[ast.AST]], modules: Collection[str], set_here: Mapping[str, int]
) -> dict[str, Operator]:
    """Operators that are made once and kept on `self`."""
    kept: dict[str, Operator] = {}
    for node in nodes.get(ast.Assign, ()):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            module, _, name = folded(dotted(node.value.func)).rpartition(".")
            if module in modules and name in _BY_FOLDED_NAME:
                kept |= {dotted(target): _BY_FOLDED_NAME[name] for target in node.targets}
    return {name: operator for name, operator in kept.items() if set_here.get(name) == 1}


def members(modules: Collection[str], names: Collection[str]) -> set[str]:
    return {f"{module}.{name}" for module in modules for name in names}
