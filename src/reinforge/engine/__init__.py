"""The embedded backend: one model that samples and learns; everything that touches a tensor."""
