"""What the conditions of a function say of its variables: facts that hold on a path, and what follows from them.

A fact is kept under the text of a condition in its positive form ("flag", "x == 1") with whether it is true, or, for
a variable whose value is known, under "=" and its name with that value. Facts are never changed, but replaced.
"""

import ast
from collections import Counter
from collections.abc import Callable, Collection, Mapping

Facts = Mapping[str, object]

UNKNOWN = object()
_NEGATED = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In, ast.GtE: ast.Lt, ast.LtE: ast.Gt}
_COMPARE: dict[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
    ast.Lt: lambda left, right: left < right,
    ast.LtE: lambda left, right: left <= right,
    ast.Gt: lambda left, right: left > right,
    ast.GtE: lambda left, right: left >= right,
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
}


class Conditions:
    """The conditions that one function asks; `local` are the names that it binds itself.

    What no noted condition mentions is not worth a fact, and neither is the outcome of one that is asked but once.
    """

    def __init__(self, local: Collection[str]) -> None:
        self._local = local
        self._asked: Counter[str] = Counter()
        self._texts: dict[ast.expr, str] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._of_patterns: dict[ast.pattern, ast.expr | None] = {}

    def note_all(self, function: ast.AST) -> None:
        for part in ast.walk(function):
            if isinstance(part, ast.If | ast.While | ast.IfExp | ast.Assert):
                self._note(part.test)
            elif isinstance(part, ast.For):
                self._note(part.iter)
        for condition in self._of_patterns.values():
            if condition:
                self._note(condition)

    def _note(self, condition: ast.expr) -> None:
        for part in ast.walk(condition):
            if isinstance(part, ast.expr):
                text, _ = self._text(part)
                self._asked[text] += 1

    def _text(self, node: ast.expr) -> tuple[str, bool]:
        """A condition in its positive form, and whether that is what was asked."""
        positive = True
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEGATED:
            opposite = _NEGATED[type(node.ops[0])]()
            node, positive = ast.Compare(node.left, [opposite], node.comparators), False
            key = ast.unparse(node)
        elif node in self._texts:
            return self._texts[node], True
        else:
            key = self._texts[node] = ast.unparse(node)
        self._names[key] = frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        return key, positive

    def of_pattern(self, subject: ast.expr, pattern: ast.pattern) -> ast.expr | None:
        """What a `case` asks of the subject, as a condition; None for what this cannot say."""
        if pattern not in self._of_patterns:
            match pattern:
                case ast.MatchValue(value=value):
                    self._of_patterns[pattern] = ast.Compare(subject, [ast.Eq()], [value])
                case ast.MatchOr(patterns=parts):
                    each = [self.of_pattern(subject, part) for part in parts]
                    known = [condition for condition in each if condition]
                    self._of_patterns[pattern] = ast.BoolOp(ast.Or(), known) if len(known) == len(each) else None
                case _:
                    self._of_patterns[pattern] = None
        return self._of_patterns[pattern]

    # What becomes of facts

    def suppose(self, condition: ast.expr, facts: Facts, *, value: bool) -> Facts:
        text, positive = self._text(condition)
        more: dict[str, object] = {}
        if any(isinstance(part, ast.Await) for part in ast.walk(condition)):
            return facts
        if self._asked[text] > 1:
            more[text] = value is positive
        match condition:
            case ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=constant)]):
                same = isinstance(operator, ast.Eq | ast.Is) if value else isinstance(operator, ast.NotEq | ast.IsNot)
                asked, _ = self._text(left)
                if same and self._asked[asked] > 1:
                    more[f"={asked}"] = constant
        return {**facts, **more} if more else facts

    def assigned(self, name: str, value: ast.expr | None, facts: Facts) -> Facts:
        """`name` has a new value, an unknown one for None."""
        left = self._forget(name, facts)
        if value is None or name not in self._names:
            return left
        constant = self._constant(value, facts)
        if constant is not UNKNOWN:
            return {**left, f"={name}": constant}
        filled = self.is_filled(value, facts)
        empty = isinstance(value, ast.List | ast.Tuple) and not value.elts
        return {**left, name: filled} if filled or empty else left

    def changed(self, name: str, facts: Facts, *, filled: bool) -> Facts:
        """A method of `name` was called: what was known of it may be over."""
        if not isinstance(facts.get(f"={name}", UNKNOWN), str | int | float):
            facts = self._forget(name, facts)
        return {**facts, name: True} if filled and name in self._names else facts

    def _forget(self, name: str, facts: Facts) -> Facts:
        gone = [key for key in facts if name in self._names.get(key.removeprefix("="), ())]
        return {key: value for key, value in facts.items() if key not in gone} if gone else facts

    # What follows from facts

    def truth(self, condition: ast.expr, facts: Facts) -> bool | None:
        """None where it is not known."""
        value = self._constant(condition, facts)
        if value is not UNKNOWN:
            return bool(value)
        text, positive = self._text(condition)
        known = facts.get(text)
        return None if known is None else known is positive

    def is_filled(self, node: ast.expr, facts: Facts) -> bool:
        """Whether there is something in it to loop over, for sure."""
        match node:
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return any(not isinstance(part, ast.Starred) for part in parts)
            case ast.Dict(keys=keys):
                return any(keys)
            case ast.Constant(value=str() | bytes() as value):
                return bool(value)
            case ast.Name(id=name):
                return facts.get(name) is True or bool(facts.get(f"={name}"))
            case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if "range" not in self._local:
                values = [_integer(self._constant(part, facts), part) for part in args]
                return bool(values) and None not in values and _ranges(values)
            case ast.Call(
                func=ast.Name(id="enumerate" | "reversed" | "sorted" | "list" | "tuple" | "set"), args=[part]
            ):
                return self.is_filled(part, facts)
            case ast.Call(func=ast.Name(id="zip"), args=args, keywords=[]):
                return bool(args) and all(self.is_filled(part, facts) for part in args)
            case ast.ListComp(generators=generators):
                return all(not part.ifs and self.is_filled(part.iter, facts) for part in generators)
        return False

    def _constant(self, node: ast.expr, facts: Facts) -> object:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARE:
                pair = self._constant(left, facts), self._constant(right, facts)
                if UNKNOWN in pair:
                    return UNKNOWN
                try:
                    return _COMPARE[type(operator)](*pair)
                except TypeError:
                    return UNKNOWN
        return facts.get(f"={self._text(node)[0]}", UNKNOWN) if facts else UNKNOWN


def _integer(value: object, node: ast.expr) -> int | None:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
    return value if isinstance(value, int) else None


def _ranges(values: Collection[int | None]) -> bool:
    numbers = [value for value in values if value is not None]
    return len(numbers) <= 3 and (len(numbers) < 3 or numbers[2] != 0) and bool(range(*numbers))
