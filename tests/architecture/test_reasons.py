"""What a payload is refused for has a verdict: else its sender would hear `unusable`, and know nothing."""

from __future__ import annotations

import ast

from arch_source import layer_of, modules

from p2pdiloco.core.api.reasons import Verdict


def test_every_word_for_which_tensors_refuse_a_payload_is_a_verdict() -> None:
    words = {
        call.args[0].value
        for module, tree in modules().items()
        if layer_of(module) == "tensors"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "RemoteError"
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    assert words and not words - {verdict.value for verdict in Verdict}
