"""What is shown or watched because of the state, without deciding anything."""
