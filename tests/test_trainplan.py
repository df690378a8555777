"""Test the package `trainplan`, by which programs and assistants ask the planner."""

import asyncio
import json
import subprocess
import sys

import pytest

from distributed_training.settings.files import ROOT
from tests.planner.test_command import ANSWER_FIELDS

QUESTION = {
    "cluster": "dual 3090",
    "model": "qwen3 8b",
    "settings": {"lora_rank": 16, "max_length": "2k"},
    "tokens": 1e6,
    "price": 0.5,
}


def test_a_program_plans_without_torch():
    code = f"""
import json, sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["numpy"] = None
import trainplan
print(json.dumps(trainplan.plan(**{QUESTION})))
try:
    trainplan.plan("dual 3090", "qwen3 8b", {{"lora_rnk": 16}})
except trainplan.UserError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    document, error = result.stdout.splitlines()
    answer = json.loads(document)
    assert [*answer, "command"] == ANSWER_FIELDS
    assert (answer["version"], answer["fits"], answer["num_processes"]) == (1, "yes", 2)
    assert answer["num_steps"] == 62  # 1e6 tokens, in steps of 2 x 4 samples of 2,048
    assert float(answer["cost"]) == pytest.approx(0.5 * answer["gpu_hours"], abs=0.005)
    assert "lora_rank" in error


def test_an_assistant_asks_through_the_protocols_own_client():
    mcp = pytest.importorskip("mcp")
    from mcp.client.stdio import stdio_client

    server = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "trainplan.mcp_server"], cwd=ROOT
    )

    async def ask():
        async with stdio_client(server) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            (tool,) = (await session.list_tools()).tools
            answers = [
                await session.call_tool(tool.name, question)
                for question in (
                    QUESTION,
                    {"cluster": "3060"},
                    {"cluster": "3060 and more"},
                    {"cluster": "3060", "lora_rank": 16},
                )
            ]
            return tool, answers

    tool, (answer, largest, error, unknown) = asyncio.run(ask())
    assert {*tool.input_schema["properties"]} == {*QUESTION}
    assert tool.input_schema["required"] == ["cluster"]
    answer = answer.structured_content
    assert "fit on 2 x RTX-3090" in answer["verdict"]
    assert {*ANSWER_FIELDS} - {*answer} == {"layouts", "command"}
    assert len(largest.structured_content["models"]) > 9
    assert error.is_error
    assert "RTX-3060" in error.content[0].text
    assert unknown.is_error
    assert "lora_rank is no argument. Use cluster, model, settings" in unknown.content[0].text
