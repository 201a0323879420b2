"""The smallest proof of a divergence: one site's operators, their real tensors, and a test that fails alike."""
