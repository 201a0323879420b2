"""An engine file of any origin, aligned with the model by the numbers that both compute."""
