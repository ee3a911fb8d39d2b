"""The tests marked `gpu` of engine, learner and weights, on a simulated device."""

from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parent.parent
LEFT_OUT = {
    # compiles a kernel for the device that there is; see test_shapes.py
    "test_flex_equals_the_rectangles_with_gradients_on_a_gpu"
}


def is_marked(test: object) -> bool:
    """Whether a test is marked, or one of its parameters."""
    marks = getattr(test, "pytestmark", [])
    parameters = [each for m in marks if m.name == "parametrize" for each in m.args[1]]
    marks = [*marks, *(mark for each in parameters for mark in getattr(each, "marks", ()))]
    return any(mark.name == "gpu" for mark in marks)


FILES = [
    file for room in ("engine", "learner", "weights") for file in (TESTS / room).glob("test_*.py")
]
FOUND = {
    name: test
    for file in FILES
    if "mark.gpu" in file.read_text()
    for name, test in vars(import_module(f"tests.{file.parent.name}.{file.stem}")).items()
    if is_marked(test)
}
globals().update({name: test for name, test in FOUND.items() if name not in LEFT_OUT})


def test_what_is_left_out_is_there():
    assert FOUND.keys() >= LEFT_OUT
    assert len(FOUND) >= 5


def test_without_a_compiler_only_these_run(request):
    """Beside parameters of marked tests that are not marked. All others are skipped there."""
    here = [each for each in request.session.items if each.path.parent == Path(__file__).parent]
    others = [each for each in here if each.originalname not in FOUND]
    assert {each.originalname for each in others if "library" not in each.fixturenames} <= {
        "test_nothing_is_left_behind",
        "test_what_is_left_out_is_there",
        "test_without_a_compiler_only_these_run",
    }
