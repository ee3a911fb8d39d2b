"""Real runs of a model that calls a tool in the form of its family, and reads the answer.

`python -m tests.runtime.test_tool_families` (`make nightly`) tries all families.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rhymeflow.data.text import rendered
from tests.environments import mcp_server, worlds
from tests.environments.test_families import SPOKEN, TOOLS, collection, speaker
from tests.environments.test_rendering import ids
from tests.runtime.logs import audit, reader, train
from tests.runtime.tiny import tiny_config

pytestmark = pytest.mark.slow

STOPS = {
    "qwen3": "<|im_end|>", "llama3_2": "<|eot_id|>", "gptoss": "<|call|>",
    "gemma3": "<end_of_turn>", "glm4moe": "<|observation|>", "lfm2_v2": "<|im_end|>",
}  # fmt: skip
WIDTH = 320
"""Of the model: more than it has tokens, so that each has a dimension to itself."""


def save_caller(directory: Path, name: str) -> None:
    """Save a model that answers every prompt with the family's call of a tool: the call is one
    token, and each token decides the next."""
    stop, (_, turn) = STOPS[name], SPOKEN[name]
    tok = speaker(name)
    tok.chat_template = collection()[name]
    tok.add_tokens([AddedToken(turn.removesuffix(stop), normalized=False)])
    tok.eos_token = stop
    tok.save_pretrained(directory)
    [call], [end] = ids(tok, turn.removesuffix(stop)), ids(tok, stop)
    last = ids(tok, rendered(tok, [{"role": "user", "content": "?"}], TOOLS))[-1]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tok), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096,
            bos_token_id=None, eos_token_id=end, pad_token_id=end, tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(len(tok), WIDTH))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[end] = 3.0
        model.lm_head.weight[end, last] = 0.0
        model.lm_head.weight[call, last] = 3.0
    model.save_pretrained(directory)


FUNCTION = f"{worlds.FILE}:multiply"
SERVER = f"mcp:{sys.executable} {mcp_server.FILE} multiplies"


@pytest.mark.parametrize("tool", [FUNCTION, SERVER], ids=["a function", "of an MCP server"])
@pytest.mark.parametrize("name", ["qwen3"])
def test_a_run_calls_a_tool(name: str, tool: str, tmp_path: Path) -> None:
    if tool == SERVER:
        pytest.importorskip("mcp")
    save_caller(tmp_path / "model", name)
    rows = [{"prompt": f"{each} times 2.5?"} for each in range(12)]
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = tmp_path / "judge.py"
    judge.write_text(
        "def judge(completions):\n    return [n % 2 for n in range(len(completions))]\n"
    )
    data: dict[str, Any] = {"source": str(source)}
    if name == "gemma3":  # its template does not tell of tools
        data["system_prompt"] = "To multiply, write <tool_call>{...}</tool_call>."
    config = tiny_config(
        tmp_path,
        data=data,
        environment={"tools": [tool], "max_turns": 2},
        reward={"functions": [{"function": f"{judge}:judge"}]},
        rollout={"max_completion_length": 400},
        learner={"max_steps": 2, "learning_rate": 1e-6},
    )
    console = Console(file=io.StringIO(), width=400)
    assert train(config, console).steps == 2
    assert ("TRL's variant for training" in console.file.getvalue()) == (name == "qwen3")
    audit(tmp_path / "run")
    tok = AutoTokenizer.from_pretrained(tmp_path / "model")
    with closing(reader(config)) as log:
        answers = [
            tok.decode(np.frombuffer(blob, "<i4").tolist())
            for (blob,) in log.query("SELECT tokens FROM segments WHERE instance = 'environment'")
        ]
    assert answers
    assert all("7.5" in each for each in answers)


if __name__ == "__main__":
    for family in SPOKEN:
        with tempfile.TemporaryDirectory() as folder:
            test_a_run_calls_a_tool(family, FUNCTION, Path(folder))
        print(f"{family}: its calls were answered")
