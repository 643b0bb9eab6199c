"""Loss scaling, autocasting and stochastic rounding."""
