"""The reward of the small runs. Runs load this file by its path, alone: it imports no test."""


def even_digits(prompts, completions, completion_ids, **columns) -> list[float]:
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]


def told_digits(**given) -> list[float]:
    print("judging \x1b[31m")
    return even_digits(**given)
