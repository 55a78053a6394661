"""What makes a program be refused before it runs: each check raises ProgramError with its class.

They give an early and clear answer to the policy; what isolates is the sandbox, so that a way around them gains
nothing. A check reports what breaks wherever it is reached; what only may break is left to the run.
"""

import ast
import functools
import importlib
from collections.abc import Callable, Collection, Iterator

from gradeflow.workflow.operators import Operator
from gradeflow.workflow.program.reading import (
    AFLOW_MODULES,
    ALLOWED_IMPORTS,
    OPERATOR_MODULE,
    PROMPT_MODULE,
    FailureClass,
    Kind,
    ProgramError,
    Reading,
    dotted,
    imported,
    members,
    prompt_modules,
)

STDIN = frozenset({"sys.stdin", "sys.__stdin__"})
REFUSED_NAMES: dict[str, FailureClass] = {
    "input": "stdin",
    "__import__": "import",
    **dict.fromkeys(
        ("open", "exec", "eval", "compile", "breakpoint", "__builtins__", "__loader__", "__spec__"), "name"
    ),
}
REFUSED_ATTRIBUTES = frozenset(
    {"__base__", "__bases__", "__builtins__", "__class__", "__closure__", "__code__", "__dict__", "__func__"}
    | {"__getattribute__", "__globals__", "__import__", "__loader__", "__mro__", "__reduce__", "__reduce_ex__"}
    | {"__self__", "__spec__", "__subclasses__", "__wrapped__", "cr_frame", "gi_frame", "ag_frame", "f_back"}
    | {"f_builtins", "f_globals", "f_locals", "tb_frame"}
)
LLM_ATTRIBUTES = frozenset({"get_usage_summary", "note", "usage"})
_USES = (ast.Expr, ast.Subscript, ast.Attribute, ast.BinOp, ast.Compare, ast.FormattedValue)
_CONTAINERS = (ast.List, ast.Tuple, ast.Dict, ast.keyword, ast.Starred)
_CLASSES: dict[Kind, type] = {"str": str, "list": list, "dict": dict, "set": set}


def check_names(reading: Reading) -> None:
    """Builtins that a workflow has no use for; a variable of that name is the program's own."""
    for node in reading.of(ast.Attribute):
        if dotted(node) in STDIN:
            raise ProgramError("stdin", f"there is nothing to read on {dotted(node)} (line {node.lineno})")
    for imports in reading.of(ast.ImportFrom):
        if any(name in STDIN for name, _ in imported(imports)):
            raise ProgramError("stdin", f"there is nothing to read on sys.stdin (line {imports.lineno})")
    for name in reading.of(ast.Name):
        failure = REFUSED_NAMES.get(name.id)
        if failure and isinstance(name.ctx, ast.Load) and not _is_own(name.id, reading):
            raise ProgramError(failure, f"{name.id} may not be used (line {name.lineno})")


def check_imports(reading: Reading) -> None:
    for node in reading.imports:
        for name, _ in imported(node):
            if not _may_be_imported(name):
                raise ProgramError("import", f"{name} may not be imported (line {node.lineno})")
            if isinstance(node, ast.ImportFrom) and node.module in ALLOWED_IMPORTS and _lacks(name):
                raise ProgramError("import", f"there is no {name} (line {node.lineno})")


def check_contract(reading: Reading) -> None:
    method = reading.method
    if not isinstance(method, ast.AsyncFunctionDef):
        raise ProgramError("contract", "class Workflow has no `async def __call__`")
    required = len(method.args.posonlyargs + method.args.args) - len(method.args.defaults)
    if required > 4 or None in method.args.kw_defaults:
        raise ProgramError("contract", "__call__ gets problem, entry_point and test, and asks for more")
    returns = list(reading.returns())
    if not any(node.value for node in returns):
        raise ProgramError("contract", "no `return answer, cost`")
    for node in returns:
        handled = any(isinstance(above, ast.ExceptHandler) for above, _ in reading.above(node))
        if not handled and (said := _no_pair(node.value, reading)):
            raise ProgramError("contract", f"returns {said} (line {node.lineno})")
    for last in tails(method.body):
        if not isinstance(last, ast.Raise | ast.Return | ast.Continue | ast.Break | ast.Assert) and not _may_exit(last):
            raise ProgramError("contract", f"ends without `return answer, cost` (line {last.lineno})")


def _no_pair(value: ast.expr | None, reading: Reading) -> str:
    match value:
        case None | ast.Constant(value=None):
            return "nothing"
        case ast.Tuple(elts=parts) if len(parts) != 2 and not has_star(parts):
            return f"{len(parts)} values, not 2"
        case ast.Tuple():
            return ""
    kinds = reading.kinds(value)
    if kinds and all(kind in {"dict", "list", "set"} or isinstance(kind, Operator) for kind in kinds):
        return "no pair"
    return ""


def tails(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The simple statements that end a block, where nothing but their own end comes after them."""
    if any(isinstance(statement, ast.Return | ast.Raise | ast.While) for statement in block[:-1]):
        return
    match block[-1]:
        case ast.If(body=body, orelse=otherwise):
            yield from tails(body)
            yield from tails(otherwise) if otherwise else ()
        case ast.With(body=body) | ast.AsyncWith(body=body):
            yield from tails(body)
        case ast.For() | ast.AsyncFor() | ast.While() | ast.Try() | ast.TryStar() | ast.Match():
            pass
        case last:
            yield last


def _may_exit(statement: ast.stmt) -> bool:
    """A call of what may never return, such as the program's own `fail()`."""
    called = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and called.func.id != "print"


def check_operators(reading: Reading) -> None:
    offered = members(reading.modules, reading.offered)
    for node in reading.of(ast.Attribute):
        name = dotted(node)
        owner = name.partition(".")[0]
        if owner in reading.modules and name not in offered:
            raise ProgramError("operator", f"{name}: no such operator (line {node.lineno})")
        if owner == "self" and _is_missing(node, reading) and _is_called(node, reading):
            raise ProgramError("operator", f"{name}: no such operator (line {node.lineno})")


def check_attributes(reading: Reading) -> None:
    prompts = prompt_modules(reading)
    for node in reading.of(ast.Attribute):
        if node.attr in REFUSED_ATTRIBUTES and not _is_class_name(node, reading):
            raise ProgramError("attribute", f"{node.attr} may not be used (line {node.lineno})")
        if not isinstance(node.ctx, ast.Load):
            continue
        if dotted(node).partition(".")[0] in prompts:
            raise ProgramError("attribute", f"{dotted(node)}: that module is empty here (line {node.lineno})")
        missing = _is_missing(node, reading) or _is_unknown(node, reading)
        if missing and not _is_guarded(node, reading):
            raise ProgramError("attribute", f"there is no {ast.unparse(node)} (line {node.lineno})")
    for call in reading.of(ast.Call):
        match call:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
                if name in REFUSED_ATTRIBUTES:
                    raise ProgramError("attribute", f"{name} may not be used (line {call.lineno})")


def _is_called(node: ast.Attribute, reading: Reading) -> bool:
    parent = reading.parents[node]
    return isinstance(parent, ast.Call) and parent.func is node


def _is_class_name(node: ast.Attribute, reading: Reading) -> bool:
    """`error.__class__.__name__` tells what went wrong."""
    parent = reading.parents[node]
    return node.attr == "__class__" and isinstance(parent, ast.Attribute) and parent.attr == "__name__"


def _is_guarded(node: ast.Attribute, reading: Reading) -> bool:
    """Whether the program may live without it."""
    if any(_is_load_of(name, {"hasattr", "setattr"}) for name in reading.of(ast.Name)):
        return True
    return any(isinstance(above, ast.Try | ast.TryStar) and part in above.body for above, part in reading.above(node))


def _is_load_of(node: ast.Name, names: Collection[str]) -> bool:
    return node.id in names and isinstance(node.ctx, ast.Load)


def _is_missing(node: ast.Attribute, reading: Reading) -> bool:
    """Whether `self` has no such attribute; every object has those with two underscores."""
    name = dotted(node)
    known = reading.attributes is None or name in reading.attributes or node.attr.startswith("__")
    return name.startswith("self.") and not known and isinstance(node.ctx, ast.Load)


def _is_unknown(node: ast.Attribute, reading: Reading) -> bool:
    if node.attr.startswith("__"):
        return False
    if dotted(node.value) == "self.llm":
        return reading.form == "body" and node.attr not in LLM_ATTRIBUTES
    if isinstance(node.value, ast.Name) and (module := _module_of(node.value.id, reading)):
        return _lacks(f"{module}.{node.attr}")
    kinds = reading.kinds(node.value)
    if len(kinds) != 1:
        return False
    (kind,) = kinds
    owner = dict if isinstance(kind, Operator) else _CLASSES.get(kind)
    return owner is not None and not hasattr(owner, node.attr)


def _module_of(name: str, reading: Reading) -> str:
    """The allowed module that a name stands for, and for nothing else."""
    if name in reading.stores or reading.parameters[name] or reading.defined[name] != 1:
        return ""
    names = (pair for node in reading.of(ast.Import) for pair in imported(node))
    return next((module for module, bound in names if bound == name and module in ALLOWED_IMPORTS), "")


def check_awaits(reading: Reading) -> None:
    for call, name in unawaited(reading):
        raise ProgramError("await", f"{name} is not awaited (line {call.lineno})")


def unawaited(reading: Reading) -> Iterator[tuple[ast.Call, str]]:
    """Calls may be kept for a later `await`, if the program has one that awaits more than a call."""
    calls = {call: operator.name for call, operator in reading.calls()}
    operators = set(calls)
    own = _coroutines(reading)
    calls |= {call: dotted(call.func) for call in reading.of(ast.Call) if dotted(call.func) in own}
    later = any(node.value not in calls for node in reading.of(ast.Await))
    for call, name in calls.items():
        parent = reading.parents[call]
        if isinstance(parent, ast.Await):
            continue
        kept = later and not isinstance(parent, _USES) and not _is_opened(parent, reading)
        if not kept or _is_handed_on(call, operators, reading):
            yield call, name


def _coroutines(reading: Reading) -> set[str]:
    """The program's own `async def`, as they are called."""
    names: set[str] = set()
    for node in reading.of(ast.AsyncFunctionDef):
        parent = reading.parents[node]
        generates = reading.of(ast.Yield) and any(isinstance(part, ast.Yield) for part in ast.walk(node))
        if generates or node.decorator_list or reading.defined[node.name] > 1 or node is reading.method:
            continue
        if parent is reading.workflow:
            names.add(f"self.{node.name}")
        elif not (isinstance(parent, ast.ClassDef) or node.name in reading.stores or reading.parameters[node.name]):
            names.add(node.name)
    return names


def _is_opened(statement: ast.AST, reading: Reading) -> bool:
    """Whether a name is assigned here whose parts are used, and never the whole."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            loads = (node for node in reading.of(ast.Name) if _is_load_of(node, {name}))
            return all(isinstance(reading.parents[node], ast.Subscript | ast.Attribute) for node in loads)
    return False


def _is_handed_on(call: ast.Call, operators: Collection[ast.Call], reading: Reading) -> bool:
    """Whether an operator is given the call for a value."""
    return next((above for above, _ in reading.above(call) if not isinstance(above, _CONTAINERS)), None) in operators


def check_arguments(reading: Reading) -> None:
    for call, operator in reading.calls():
        names = [keyword.arg for keyword in call.keywords]
        if None in names or has_star(call.args):
            continue
        if len(call.args) > len(operator.parameters):
            raise ProgramError("arguments", f"{operator.name} takes {len(operator.parameters)} arguments")
        given = [*operator.parameters[: len(call.args)], *(name for name in names if name)]
        if reason := operator.unfit(given):
            raise ProgramError("arguments", f"{reason} (line {call.lineno})")


def check_variables(reading: Reading) -> None:
    for found in reading.unbound:
        if found.certain:
            said = "before it is assigned" if found.local else "and never assigned"
            raise ProgramError("unbound", f"{found.name} is read {said} (line {found.line})")


CHECKS: tuple[Callable[[Reading], None], ...] = (
    check_names,
    check_imports,
    check_contract,
    check_operators,
    check_awaits,
    check_arguments,
    check_variables,
    check_attributes,
)


def _is_own(name: str, reading: Reading) -> bool:
    return name in reading.stores or bool(reading.parameters[name] or reading.defined[name])


def _may_be_imported(name: str) -> bool:
    root, module = name.partition(".")[0], name.rpartition(".")[0]
    if root in ALLOWED_IMPORTS or name == "__future__.annotations" or not AFLOW_MODULES.isdisjoint((name, module)):
        return True
    return any(map(OPERATOR_MODULE.fullmatch, (name, module))) or bool(PROMPT_MODULE.fullmatch(name))


@functools.cache
def _lacks(name: str) -> bool:
    """Whether an allowed module has no such member; one imported with `*` has them all."""
    module, _, member = name.rpartition(".")
    return member != "*" and not hasattr(importlib.import_module(module), member)


def has_module_member(module: str, name: str) -> bool:
    return module in ALLOWED_IMPORTS and not _lacks(f"{module}.{name}")


def has_star(parts: Collection[ast.expr]) -> bool:
    return any(isinstance(part, ast.Starred) for part in parts)
