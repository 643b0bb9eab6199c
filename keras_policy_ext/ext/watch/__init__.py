"""Follow what float8 does to each layer while a model trains, and act on it."""
