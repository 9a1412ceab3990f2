"""The small changes that are made to code: what a node of its syntax tree becomes."""

import ast
from collections.abc import Iterator

# A span of the source as the offsets of its bytes, and what stands there instead.
Change = tuple[int, int, str]

_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
_NAMES = {
    "any": "all",
    "all": "any",
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmax": "argmin",
    "argmin": "argmax",
}
# Calls that give one of their arguments back, more or less.
_ARGUMENTS = {"stop_gradient": 0, "instantiated": 0, "moveaxis": 0, "put": 0}


class Source:
    """The text of a module, and its syntax tree."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.tree = ast.parse(text)
        lengths = [len(line) for line in self.text.splitlines(keepends=True)]
        self._starts = [sum(lengths[:i]) for i in range(len(lengths))]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def __getitem__(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end].decode()


def changes(source: Source, node: ast.AST) -> Iterator[Change]:
    """Everything that a node may become."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield _between(source, left, right, f" {_COMPARISONS[type(op)]} ")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            yield _between(source, left, right, f" {_ARITHMETIC[type(op)]} ")
            if isinstance(op, ast.Add | ast.Sub):
                yield *source.span(node), f"({source[left]})"
        case ast.BoolOp(op=op, values=[left, right, *_]):
            word = " and " if isinstance(op, ast.Or) else " or "
            yield _between(source, left, right, word)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield *source.span(node), f"({source[operand]})"
        case ast.IfExp(test=test) | ast.If(test=test) | ast.While(test=test):
            if not _has_an_opposite(test):
                yield *source.span(test), f"not ({source[test]})"
        case ast.Constant(value=bool(value)):
            yield *source.span(node), str(not value)
        case ast.Constant(value=int(value)):
            yield *source.span(node), str(value + 1)
        case ast.Call():
            yield from _calls(source, node)
        case ast.List(elts=elements) | ast.Tuple(elts=elements, ctx=ast.Load()):
            yield from _sequences(source, elements)
        case ast.Expr(value=ast.Call()):
            yield *source.span(node), "pass"
        case ast.Subscript(value=value, slice=ast.Slice()):
            yield *source.span(node), source[value]


def _has_an_opposite(test: ast.expr) -> bool:
    """Whether a condition is negated by a change of its own."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Compare(ops=[op]):
            return not isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return False


def _calls(source: Source, node: ast.Call) -> Iterator[Change]:
    function, arguments = node.func, node.args
    name = getattr(function, "attr", getattr(function, "id", ""))
    _, end = source.span(function)
    if name in _NAMES:
        yield end - len(name), end, _NAMES[name]
    if name in _ARGUMENTS and len(arguments) > _ARGUMENTS[name]:
        yield *source.span(node), source[arguments[_ARGUMENTS[name]]]
    if name == "where" and len(arguments) == 3:
        _, one, other = arguments
        yield (
            source.span(one)[0],
            source.span(other)[1],
            f"{source[other]}, {source[one]}",
        )
    # An array's own sum along an axis: one of the entries in place of all.
    if name == "sum" and isinstance(function, ast.Attribute) and len(arguments) == 1:
        yield *source.span(node), f"{source[function.value]}[{source[arguments[0]]}]"


def _sequences(source: Source, elements: list[ast.expr]) -> Iterator[Change]:
    """One of several that are put together is left out."""
    for element in elements if len(elements) > 1 else []:
        if isinstance(element, ast.Starred):
            yield *source.span(element), "*()"


def _between(source: Source, left: ast.expr, right: ast.expr, word: str) -> Change:
    """Another operator, where both of its operands keep their parentheses."""
    start, end = source.span(left)[1], source.span(right)[0]
    gap = source.text[start:end].decode()
    before = ")" * gap.count(")")
    return start, end, before + word + "(" * gap.count("(")
