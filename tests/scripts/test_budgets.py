import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def budgets() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts/budgets.py"
    spec = importlib.util.spec_from_file_location("budgets", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["budgets"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def test_files_and_functions_are_measured_without_docstrings(
    budgets: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        'class A:\n    def f(self):\n        """One.\n\n        Two.\n        """\n'
        "        async def g():\n            return 1\n        return g\n"
    )
    sizes = {size.what: size.lines for size in budgets.measure_file(file)}
    assert sizes == {str(file): 9, f"{file}:A.f": 4, f"{file}:A.f.g": 2}


def test_what_is_over_is_reported_with_the_exceptions_nobody_needs(budgets: ModuleType) -> None:
    sizes = [
        budgets.Size("long", 60, 50),
        budgets.Size("allowed", 60, 50),
        budgets.Size("beyond", 71, 50),
        budgets.Size("short", 10, 50),
    ]
    faults = budgets.judge(sizes, {"allowed": 70, "beyond": 70, "short": 70, "gone": 70})
    assert [fault.split(": ")[0] for fault in faults[:2]] == ["beyond", "long"]
    assert [fault.split(": ")[1].split()[0] for fault in faults[2:]] == ["gone", "short"]


def test_an_exception_needs_a_reason(budgets: ModuleType) -> None:
    assert budgets.read_exceptions("# note\n\na.py:f 60 one table\n") == {"a.py:f": 60}
    with pytest.raises(ValueError, match=r"no reason given for a\.py"):
        budgets.read_exceptions("a.py 60\n")
