"""The Zero Bubble papers' measurements on A100s beside what the simulator predicts.

It predicts from their own pass times: no GPU is needed to see how far to trust a prediction.
"""
