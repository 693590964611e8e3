"""The HTTP side: OpenAI's routes over a ``Dispatcher``. It knows no stage, no model and no Ray."""
