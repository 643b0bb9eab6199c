"""Float8 forms of Keras's recurrent layers."""
