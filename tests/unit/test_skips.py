"""A run fails when a test is skipped for a reason that is not listed, in one process and over workers."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

LISTED = "import pytest\ndef test_it(): pytest.skip('install clang')"
UNLISTED = {
    "called": ("import pytest\ndef test_it(): pytest.skip('no time')", "::test_it: no time"),
    "longer": ("import pytest\ndef test_it(): pytest.skip('install clang 99')", "::test_it: install clang 99"),
    "marked": ("import pytest\n@pytest.mark.skip(reason='later')\ndef test_it(): pass", "::test_it: later"),
    "expected": ("import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert 0", "::test_it: known"),
    "module": ("import pytest\npytest.skip('not here', allow_module_level=True)", ": not here"),
    "package": ("import pytest\npytest.importorskip('no_such_package')", ": could not import 'no_such_package': *"),
}
OTHERS = "def test_passes(): pass"


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_each_is_named_and_fails_the_run(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile(
        test_listed=LISTED, test_passes=OTHERS, **{f"test_{name}": text for name, (text, _) in UNLISTED.items()}
    )
    result = pytester.runpytest("-p", "skips", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines("*skipped for a reason that tests/skips.py does not list*")
    text = result.stdout.str().partition("does not list")[2]
    for name, (_, line) in UNLISTED.items():
        assert text.count(f"test_{name}.py{line.rstrip('*')}") == 1, (name, text)
    assert "test_listed" not in text
    result.assert_outcomes(passed=1, skipped=6, xfailed=1)


def test_those_that_are_listed_do_not(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_listed=LISTED, test_passes=OTHERS)
    result = pytester.runpytest("-p", "skips")
    assert result.ret == pytest.ExitCode.OK
    assert "does not list" not in result.stdout.str()
    result.assert_outcomes(passed=1, skipped=1)


def test_a_run_that_failed_keeps_its_exit_code(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_called=UNLISTED["called"][0], test_broken="import nothing_there")
    assert pytester.runpytest("-p", "skips").ret == pytest.ExitCode.INTERRUPTED
