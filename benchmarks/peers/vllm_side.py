"""vLLM's side of `bench engine`: run by vLLM's own python, imports nothing of Rhymeflow.

python vllm_side.py CHECKPOINT        # requests {prompts, lengths}, answers {seconds, lengths}
"""

import json
import os
import sys
import time

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING")


def main() -> None:
    """Answer workloads until stdin ends; `Peer` has the protocol."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=32,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    print("answer:{}", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        inputs = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in work["lengths"]
        ]
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        print("answer:" + json.dumps({"seconds": seconds, "lengths": lengths}), flush=True)


if __name__ == "__main__":
    main()
