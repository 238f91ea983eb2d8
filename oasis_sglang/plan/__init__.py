"""The capacity model behind ``oasis plan``: what a model, a budget and a machine make of each other. Arithmetic, no torch."""
