"""Load a checkpoint and talk to it: python examples/chat.py CHECKPOINT_OR_RUN [QUESTION]."""

import sys

import temper

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    question = sys.argv[2] if len(sys.argv) > 2 else "7+5="
    with temper.load(sys.argv[1]) as policy:
        print("greedy: ", policy.chat(question, max_new_tokens=16))
        for answer in policy.generate([question], n=4, max_new_tokens=16)[0]:
            print("sampled:", answer)
