"""How a model is spread over devices, applied from outside the model."""
