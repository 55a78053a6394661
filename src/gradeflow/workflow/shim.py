"""The script that runs a workflow inside the sandbox; the host sends its text, and never imports it.

It gives the program AFlow's modules and operators; each operator call is a call to the host. It must not name
Python's event loop: the harness starts one, which is slow, where the text of a job names it.
"""

# mypy: ignore-errors
# Types would cost each run the import of typing.

import sys

import harness  # exists inside the sandbox only

SOURCE = harness.inputs["source"]


class Llm:
    def __init__(self):
        self.usage = {"total_input_tokens": 0, "total_output_tokens": 0, "total_cost": 0.0, "call_count": 0}

    def get_usage_summary(self):
        return dict(self.usage)

    def note(self, usage):
        if usage["call_count"] >= self.usage["call_count"]:
            self.usage = usage


LLM = Llm()


class Operator:
    parameters = ()

    def __init__(self, llm=None, *_, **__):
        pass

    async def __call__(self, *values, **named):
        name = type(self).__name__
        if len(values) > len(self.parameters):
            raise TypeError(f"{name} takes {len(self.parameters)} arguments")
        arguments = {**dict(zip(self.parameters, values, strict=False)), **named}
        reply = await harness.acall(name, **arguments)
        LLM.note(reply["usage"])
        return reply["value"]


OPERATORS = {
    name: type(name, (Operator,), {"parameters": parameters})
    for name, parameters in harness.inputs["operators"].items()
}


def provide(name, **contents):
    """Put a module in place, and the packages above it."""
    module = sys.modules.get(name) or type(sys)(name)
    vars(module).update(contents)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(provide(parent), leaf, module)
    return module


def provide_aflow():
    provide("scripts.async_llm", create_llm_instance=lambda *_, **__: LLM)
    provide("scripts.evaluator", DatasetType=str)
    for word in SOURCE.split():
        match word.strip("(),;").split("."):
            case ["workspace", dataset, *below]:
                provide(f"workspace.{dataset}.workflows.template.operator", **OPERATORS)
                for round_n in below[1:2]:
                    provide(f"workspace.{dataset}.workflows.{round_n}.prompt")  # whose texts are not here


def body_class():
    """A Workflow whose `__call__` has the program as its body, with the program's own line numbers."""
    only_ast = 0x400
    method = compile("async def __call__(self, problem, entry_point): pass", __file__, "exec", only_ast)
    method.body[0].body = compile(SOURCE, __file__, "exec", only_ast).body
    members = {attribute: OPERATORS[name]() for attribute, name in harness.inputs["attributes"].items()}
    scope = {"__name__": "workflow"}
    exec(compile(method, __file__, "exec"), scope)  # noqa: S102 - the sandbox is for this
    return type("Workflow", (), {**members, "llm": LLM, "__call__": scope["__call__"]})


def written_class():
    scope = {"__name__": "workflow"}
    exec(compile(SOURCE, __file__, "exec"), scope)  # noqa: S102 - the sandbox is for this
    return scope["Workflow"]


def as_many(function, *values):
    """As many of the values as the function has parameters after `self`."""
    code = getattr(function, "__code__", None)
    return values[: code.co_argcount - 1] if code else ()


def is_number(value):
    return hasattr(value, "__float__")


def main():
    provide_aflow()
    workflow_class = {"body": body_class, "class": written_class}[harness.inputs["form"]]()
    workflow = workflow_class(*as_many(workflow_class.__init__, "workflow", {}, harness.inputs["dataset"]))
    given = (harness.inputs[name] for name in ("problem", "entry_point", "tests"))
    returned = harness.drive(workflow(*as_many(workflow_class.__call__, *given)))
    match returned:
        case (answer, cost) if (
            isinstance(returned, tuple) and is_number(cost) and (isinstance(answer, str) or is_number(answer))
        ):
            harness.result({"answer": str(answer)})
        case tuple():
            harness.result({"returned": f"({', '.join(type(part).__name__ for part in returned)})"})
        case _:
            harness.result({"returned": type(returned).__name__})


main()
