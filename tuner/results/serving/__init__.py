"""The model server: what a request may ask, how its prompt is made, how tokens are generated, and the app that answers.

`requests` checks what arrives, `prompts` renders it in a process of its own, `engine` (or `vllm`) generates, `answers`
makes OpenAI's objects of that, and `app` is the door.
"""
