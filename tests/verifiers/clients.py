"""Programs that speak to the policy by libraries that have no place in Rhymeflow's environment."""

import asyncio
import os

from tests.environments.programs import ADD

QUESTION = [{"role": "user", "content": "add"}]


def uses_litellm(base_url):
    """A call, its answer, and the same as a stream."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched
    import litellm

    asked = {"model": "openai/policy", "api_base": base_url, "api_key": "none", "tools": [ADD]}
    first = litellm.completion(messages=QUESTION, stop=["\n\n"], **asked).choices[0]
    [call] = first.message.tool_calls
    answer = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    talk = [*QUESTION, first.message.model_dump(), answer]
    said = litellm.completion(messages=talk, **asked).choices[0]
    chunks = [*litellm.completion(messages=talk, stream=True, **asked)]
    text = "".join(each.choices[0].delta.content or "" for each in chunks)
    ends = first.finish_reason, call.function.arguments, said.finish_reason
    if ends != ("tool_calls", '{"a": 41}', "stop") or said.message.content != "42":
        raise ValueError(f"{ends} {said}")
    return float(text)


async def uses_openai_agents(base_url, row):
    """An agent with a function, over chat completions or over responses."""
    import agents
    from openai import AsyncOpenAI

    @agents.function_tool
    def add(a: int) -> int:
        """Add."""
        return a + 1

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    kinds = agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel
    model = kinds[row["responses"]]("policy", openai_client=client)
    agent = agents.Agent(name="x", instructions="Calculate.", tools=[add], model=model)
    whole = await agents.Runner.run(agent, "add")
    streamed = agents.Runner.run_streamed(agent, "add")
    async for _ in streamed.stream_events():
        pass
    if whole.final_output != streamed.final_output:
        raise ValueError(f"{whole.final_output} {streamed.final_output}")
    return float(whole.final_output)


def uses_train_client(base_url, row):
    """verifiers renders, and sends and gets tokens; returns how many it would train on."""
    import verifiers.v1 as vf
    from renderers import DefaultRendererConfig
    from sumtools.taskset import SumConfig, SumTaskset
    from verifiers.v1.harnesses.null.harness import NullHarnessConfig
    from verifiers.v1.runtimes import SubprocessConfig

    os.environ["POLICY_KEY"] = "none"
    config = vf.AgentConfig(
        harness=NullHarnessConfig(id="null"),
        runtime=SubprocessConfig(),
        model="policy",
        client=vf.TrainClientConfig(
            base_url=base_url,
            api_key_var="POLICY_KEY",
            renderer=DefaultRendererConfig(),
            renderer_model_name=row["tokenizer"],
        ),
        sampling=vf.SamplingConfig(temperature=1.0, max_tokens=24),
        max_turns=4,
    )

    async def run():
        agent = vf.make_agent(config)
        async with agent:
            return await agent.run(next(iter(SumTaskset(SumConfig()))))

    trace = asyncio.run(run())
    if trace.errors:
        raise ValueError(str(trace.errors[0]))
    [branch] = trace.branches
    tokens = [t for t, is_said in zip(branch.token_ids, branch.sampled_mask) if is_said]  # noqa: B905
    if tokens != row["sampled"] or set(branch.logprobs) - {0.0, -1.0}:
        raise ValueError(f"{tokens} {branch.logprobs}")
    return float(len(tokens))
