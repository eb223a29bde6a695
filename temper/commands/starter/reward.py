"""A reward of your own: any function (prompt, response, answer) -> number. None means "cannot be scored"."""


def share_in_place(prompt: str, response: str, answer: str | None) -> float:
    """1 for the right answer, less for each letter that is missing, wrong or too many."""
    assert answer is not None
    right = sum(said == wanted for said, wanted in zip(response, answer, strict=False))
    return right / max(len(response), len(answer))
