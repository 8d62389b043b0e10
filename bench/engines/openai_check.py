#!/usr/bin/env python3
"""Uses an OpenAI-compatible server as an application would, with the official client.

usage: openai_check.py http://HOST:PORT
"""
import sys

import openai


def main(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    ask = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 6,
        "extra_body": {"ignore_eos": True},
    }

    assert "tiny" in [model.id for model in client.models.list()]
    print("models: ok")

    plain = client.chat.completions.create(**ask)
    assert plain.usage.completion_tokens == 6, plain
    print("plain: ok")

    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length", chunks[-1]
    assert len(chunks) >= 6, len(chunks)
    print("stream: ok")

    ask["max_tokens"] = 3000
    with client.chat.completions.create(**ask, stream=True) as stream:
        next(iter(stream))
    print("abandoned stream: ok")

    try:
        client.chat.completions.create(model="tiny", messages="no list")
    except openai.APIStatusError as error:
        assert error.status_code in (400, 422, 500), error
        assert error.response.headers["x-prefixlb-backend"]
    else:
        raise AssertionError("a bad request was accepted")
    print("error: ok")

    # An answer of prefixlb's own, which the client must understand as well as an engine's.
    try:
        client.chat.completions.create(**{**ask, "model": "nobody-serves-this"})
    except openai.NotFoundError as error:
        assert error.type == "not_found_error", error
        assert error.code and error.body["message"], error
    else:
        raise AssertionError("an unknown model was accepted")
    print("our own error: ok")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
