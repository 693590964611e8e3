"""The HTTP side: OpenAI's routes over a ``Dispatcher``. It knows no stage and no model, and it starts nothing itself."""
