"""vLLM's side of the engine benchmark: run by vLLM's own python, imports nothing of Rhymeflow.

Reads one workload a line from stdin, as JSON [prompts, lengths]; answers each with a line
`side:done TOKENS SECONDS`.
"""

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=32,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    print("side:ready", flush=True)
    for line in sys.stdin:
        prompts, lengths = json.loads(line)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"side:done {tokens} {seconds}", flush=True)


if __name__ == "__main__":
    main()
