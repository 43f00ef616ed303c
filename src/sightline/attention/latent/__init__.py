"""The ways of computing latent attention."""
