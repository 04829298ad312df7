"""Version v1alpha1 of the API group clora.dev."""
